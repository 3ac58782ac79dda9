"""Start the training program again and again without importing torch each time.

A server process imports the program once and forks a child for each run. It does nothing else, so it has one thread
and no state that a child could inherit; `torture.py` compares a forked run with one of a process of its own.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

LONGEST_RUN = 120.0
"""Seconds after which a run counts as hanging."""


@dataclasses.dataclass(frozen=True)
class Ended:
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


class Forker:
    """Runs of the training program, one at a time."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}},
        )

    def __enter__(self) -> Forker:
        return self

    def __exit__(self, *_: object) -> None:
        with self._server as server:
            server.stdin.close()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: pathlib.Path) -> int:
        """Start a run and return its process id; `wait` must follow."""
        self._log = log
        job = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        pid = int(self._server.stdout.readline())
        self._began = time.perf_counter()
        return pid

    def wait(self) -> Ended:
        """Return how the run ended."""
        code = int(self._server.stdout.readline())
        return Ended(code, self._log.read_text(errors="replace"), time.perf_counter() - self._began)

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: pathlib.Path,
        after: float = LONGEST_RUN,
        signum: int = signal.SIGKILL,
    ) -> Ended:
        """Run the program, and send it a signal after so many seconds if it still runs."""
        pid = self.start(arguments, environment, log)
        if not self._ends_within(after):
            os.kill(pid, signum)  # still there, at least as a zombie: the server has not said otherwise
            if not self._ends_within(LONGEST_RUN):
                os.kill(pid, signal.SIGKILL)
        ended = self.wait()
        if ended.seconds >= LONGEST_RUN:
            raise TimeoutError(f"a run took {ended.seconds:.0f} s:\n{ended.output}")
        return ended

    def _ends_within(self, seconds: float) -> bool:
        return bool(select.select([self._server.stdout], [], [], seconds)[0])


def serve() -> None:
    """Fork a child for each job that comes in, and say its process id and how it ended."""
    import program
    import psutil  # noqa: F401  # this and those below: a run would import them later
    import torch._dynamo  # noqa: F401

    from determined.tracking import Recorder, Records  # noqa: F401

    gc.freeze()  # so that children do not copy all memory by collecting garbage in it
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        assert len(os.listdir("/proc/self/task")) == 1, "forking is sound only from a process with one thread"
        pid = os.fork()
        if pid == 0:
            answers.close()
            _become(json.loads(line), program.main)
        print(pid, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers)


def _become(job: dict[str, Any], main: Callable[[], None]) -> NoReturn:
    """Be the program for the rest of this process."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["environment"])
    sys.argv[1:] = job["arguments"]
    code = 0
    try:
        main()
    except SystemExit as request:
        code = int(request.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # taking torch apart takes longer than the training


if __name__ == "__main__":
    serve()
