"""One process of a run, as its keeper sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from determined.experiment.executors._base import RunSpec
from determined.experiment.executors._beginning import Beginning, fork
from determined.experiment.executors._output import STREAMS, LogFile, Output
from determined.experiment.executors._patterns import Patterns
from determined.launch._ends import RankExit


class Rank:
    """A process that trains, and its output."""

    def __init__(self, number: int, spec: RunSpec, patterns: Patterns, body: Callable[[Beginning], None]) -> None:
        self.number = number
        self._file = LogFile(spec.files.log(number))
        forked = fork(body)
        self.pid = forked.pid
        self.beginning = forked.beginning
        os.set_blocking(self.beginning, False)
        pipes = (forked.stdout, forked.stderr)
        self.outputs = [
            Output(pipe, stream, self._file, patterns.look) for pipe, stream in zip(pipes, STREAMS, strict=True)
        ]

    @property
    def last_lines(self) -> list[str]:
        """The end of its error output."""
        return list(self.outputs[1].last_lines)

    def complaint(self) -> str:
        """Return why it cannot begin with what it is for, if it has just said so."""
        try:
            return os.read(self.beginning, 4096).decode(errors="replace")
        except BlockingIOError:
            return ""

    def say(self, text: str) -> None:
        """Add a line to its log that is not its own."""
        self._file.write("stderr", [text])

    def end(self, code: int, by_keeper: bool) -> RankExit:
        """Return its end, which has just come."""
        return RankExit(self.number, code, time.monotonic(), by_keeper, self.outputs[1].traceback_at)

    def drain(self) -> None:
        """Store what is left of its output."""
        for output in self.outputs:
            output.drain()

    def close(self) -> None:
        """Let go of its pipes and its log."""
        for output in self.outputs:
            os.close(output.pipe)
        os.close(self.beginning)
        self._file.close()
