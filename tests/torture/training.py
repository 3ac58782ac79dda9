"""Runs of the training program, forked from a process that has imported torch."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

import forking

PROGRAM = str(pathlib.Path(__file__).with_name("program.py"))
RUN_TIMEOUT_S = 120.0
"""Seconds after which a run counts as hanging."""


@dataclasses.dataclass(frozen=True)
class RunExit:
    """How a run ended: negative, the signal that killed it."""

    code: int
    output: str
    seconds: float = 0.0

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def was_stopped(self) -> bool:
        """Whether SIGTERM ended it, with a checkpoint or before there was anything to save."""
        return self.code in (-signal.SIGTERM, 128 + signal.SIGTERM)


def train(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: pathlib.Path,
    after: float = RUN_TIMEOUT_S,
    signum: int = signal.SIGKILL,
) -> RunExit:
    """Run the program, and send it a signal after some seconds if it still runs."""
    began = time.perf_counter()
    with log.open("w") as output:
        process = forking.start(
            [PROGRAM, *arguments],
            env={**os.environ, **environment},
            stdin=forking.DEVNULL,
            stdout=output.fileno(),
            stderr=forking.STDOUT,
        )
    with process:
        for seconds, then in ((after, signum), (RUN_TIMEOUT_S, signal.SIGKILL)):
            try:
                code = process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                process.send_signal(then)
        else:
            raise TimeoutError(f"a run took {time.perf_counter() - began:.0f} s:\n{log.read_text(errors='replace')}")
    return RunExit(code, log.read_text(errors="replace"), time.perf_counter() - began)
