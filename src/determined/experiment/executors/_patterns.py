"""Look for patterns in the output of a run, without ever being held up by one."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from types import FrameType

LONGEST_SUBJECT = 4096
"""Characters of a line that are looked at."""
LONGEST_SEARCH = 1.0
"""Seconds of computing after which a pattern counts as one that takes too long."""


class _TakesTooLong(Exception):
    """A pattern is of the kind that takes for ever on some lines."""


class Patterns:
    """Regular expressions, and the first line of the output that each was found in.

    To be used by the main thread of a process that needs no SIGVTALRM for anything else.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.matches: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        """Patterns that are not looked for, and why."""
        self._sought: dict[str, re.Pattern[str]] = {}
        for pattern in patterns:
            try:
                self._sought[pattern] = re.compile(pattern)
            except (re.error, RecursionError) as error:
                self.problems[pattern] = f"it is not a regular expression ({error})"

    def look(self, lines: Iterable[str]) -> None:
        """Look at lines of the output."""
        if not self._sought:
            return
        before = signal.signal(signal.SIGVTALRM, _give_up)
        try:
            for line in lines:
                self._look_at(line[:LONGEST_SUBJECT])
        finally:
            signal.signal(signal.SIGVTALRM, before)

    def _look_at(self, line: str) -> None:
        for pattern, expression in list(self._sought.items()):
            found = None
            try:
                # The search itself looks out for signals.
                signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_SEARCH)
                found = expression.search(line)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            except _TakesTooLong:
                self.problems[pattern] = f"it took more than {LONGEST_SEARCH:g} s on one line; write a simpler one"
            if found is not None:
                self.matches[pattern] = line
            if found is not None or pattern in self.problems:
                del self._sought[pattern]


def _give_up(signum: int, frame: FrameType | None) -> None:
    raise _TakesTooLong
