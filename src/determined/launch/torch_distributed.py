"""Train with one process per slot: `python -m determined.launch.torch_distributed [torchrun options --] script.py`.

Every line that a rank writes begins with `[rank=N]`. Signals reach every rank, which may save and end; the exit status
is that of the first rank that did not end with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import NoReturn

from determined import errors
from determined._info import ClusterInfo, get_cluster_info
from determined.core.distributed import timeout_seconds
from determined.launch._command import (
    MODULE,
    USAGE,
    UsageError,
    command_of_script,
    command_of_trial,
    split,
    trial_of,
)
from determined.launch._supervisor import Supervisor, say
from determined.launch._torchrun import grace_period_of, launch_config, read_options, starter

_MAX_FOLDER = 90  # as that of a socket


def main(words: list[str] | None = None) -> int:
    """Start the ranks that a command line asks for, and return the exit status when they have ended."""
    words = sys.argv[1:] if words is None else words
    with _folder() as folder:
        try:
            parts = split(words)
            info = get_cluster_info()
            options = read_options(parts.options, info)
            command = _command(parts.program, options, info)
            config = launch_config(options, folder)
        except (UsageError, ValueError, errors.DeterminedException) as error:
            say(f"{error}\nusage: {USAGE}")
            return 2
        os.environ["DET_LAUNCH_COMMAND"] = shlex.join([sys.executable, "-m", MODULE, *words])
        grace_period = grace_period_of(options)
        wait = max(grace_period, timeout_seconds())
        return Supervisor(command, config.nproc_per_node, grace_period, folder, wait).run(starter(config))


def _command(program: list[str], options: argparse.Namespace, info: ClusterInfo | None) -> list[str]:
    trial = trial_of(program)
    if trial is None:
        return command_of_script(program, is_module=options.module, no_python=options.no_python)
    from determined.launch._harness import check

    check(trial.entrypoint, trial.config, info)
    return command_of_trial(trial)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Give a folder that nobody else can reach, with a path short enough for a socket in it."""
    folder = tempfile.mkdtemp(prefix="det-launch-")
    if len(folder) > _MAX_FOLDER:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="det-launch-", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run() -> NoReturn:
    """Do what the command line of this process asks for, and end it."""
    status = main()
    if threading.active_count() > 1:  # torchrun still waits for other machines
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
