"""Search the output of a run for patterns, without ever being held up by one."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from types import FrameType

MAX_SUBJECT = 4096
"""Characters of a line that are searched."""
SEARCH_TIMEOUT_S = 1.0
"""Seconds of computing after which a pattern counts as one that takes too long."""


class _TakesTooLong(Exception):
    """A pattern takes too long on some line."""


class Patterns:
    """Regular expressions, and the first line of the output that each was found in.

    To be used by the main thread of a process that needs no SIGVTALRM for anything else.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.matches: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        """Patterns that are not searched for, and why."""
        self._wanted: dict[str, re.Pattern[str]] = {}
        for pattern in patterns:
            try:
                self._wanted[pattern] = re.compile(pattern)
            except (re.error, RecursionError) as error:
                self.problems[pattern] = f"it is not a regular expression ({error})"

    def check(self, lines: Iterable[str]) -> None:
        """Search lines of the output."""
        if not self._wanted:
            return
        before = signal.signal(signal.SIGVTALRM, _give_up)
        try:
            for line in lines:
                self._check_line(line[:MAX_SUBJECT])
        finally:
            signal.signal(signal.SIGVTALRM, before)

    def _check_line(self, line: str) -> None:
        for pattern, expression in list(self._wanted.items()):
            found = None
            try:
                # The search itself checks for signals.
                signal.setitimer(signal.ITIMER_VIRTUAL, SEARCH_TIMEOUT_S)
                found = expression.search(line)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            except _TakesTooLong:
                self.problems[pattern] = f"it took more than {SEARCH_TIMEOUT_S:g} s on one line; write a simpler one"
            if found is not None:
                self.matches[pattern] = line
            if found is not None or pattern in self.problems:
                del self._wanted[pattern]


def _give_up(signum: int, frame: FrameType | None) -> None:
    raise _TakesTooLong
