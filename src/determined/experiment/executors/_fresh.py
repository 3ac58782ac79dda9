"""Train a trial class in a forked process that looks as if it had just been started for it."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from typing import NoReturn

from determined._packages import explained
from determined.experiment.executors._base import RunSpec
from determined.experiment.executors._beginning import Beginning
from determined.experiment.executors._ending import run_to_end, show
from determined.experiment.executors._environment import THREAD_VARIABLES
from determined.experiment.executors._processes import call_this

HARNESS = "determined.launch._harness"


def train_class(spec: RunSpec, environment: Mapping[str, str], beginning: Beginning) -> NoReturn:
    """Train, and end the process."""
    call_this(f"det-trial-{spec.trial_id}")
    os.environ.clear()
    os.environ.update(environment)
    entrypoint = str(spec.entrypoint)
    command = ["-m", HARNESS, "--trial", entrypoint]
    sys.orig_argv = [sys.executable, "-u", *command]
    sys.argv = [_become_main(), *command[2:]]
    os.chdir(spec.code)
    sys.path[:] = import_path(str(spec.code), environment.get("PYTHONPATH", ""))
    if THREAD_VARIABLES[0] not in spec.environment:
        sys.modules["torch"].set_num_threads(spec.placement.get("threads", 1))
    # Else all trials would draw the same. Python's own generator is new in every process, torch's always the same.
    sys.modules["numpy"].random.seed()
    run_to_end(lambda: _train(entrypoint, beginning))


def _train(entrypoint: str, beginning: Beginning) -> None:
    from determined.launch._harness import load_class, train

    try:
        load_class(entrypoint)
    except Exception as error:
        show(error)
        beginning.failed(explained(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
    beginning.done()
    train(entrypoint)


def import_path(code: str, given: str) -> list[str]:
    """Return where modules are looked for: first in the code folder, from which the folders of PYTHONPATH count too."""
    folders = list(filter(None, given.split(os.pathsep)))
    # The process that this one was forked from took them as from its own working folder.
    theirs = {os.path.abspath(os.path.join(os.sep, folder)) for folder in folders}
    ours = [os.path.abspath(os.path.join(code, folder)) for folder in folders]
    return list(dict.fromkeys([code, *ours, *(entry for entry in sys.path if entry not in theirs)]))


def _become_main() -> str:
    """Make the harness the program of this process, as `python -m` would; returns its file.

    Workers that the trial starts anew import the program that their parent names.
    """
    harness = sys.modules[HARNESS]
    main = types.ModuleType("__main__")
    main.__spec__, main.__file__, main.__loader__ = harness.__spec__, harness.__file__, harness.__loader__
    sys.modules["__main__"] = main
    return str(harness.__file__)
