"""How the ranks of one machine exited, and which of them failed first."""

from __future__ import annotations

import dataclasses
import signal

_STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT}
_TRACEBACK_AGE_S = 10.0
"""Seconds that a program may take to end after a traceback that is the reason."""
_HEAD_START_S = 2.0
"""Seconds that it may take to hear of a program that was killed, while others already fail for want of it."""
_SIGNAL_NAMES = {int(which): which.name for which in signal.Signals}


@dataclasses.dataclass(frozen=True, slots=True)
class RankExit:
    """How the program of one rank exited."""

    rank: int
    code: int
    """As `subprocess` gives it: that of a program that a signal killed is negative."""
    time: float
    by_supervisor: bool = False
    """Whether it died of a signal from its supervisor."""
    traceback_at: float | None = None
    """When it began its last traceback of Python."""
    blamed: int | None = None
    """The rank because of which it exited, as it said itself."""
    overdue: str = ""
    """Why its supervisor killed it, if it did not end after others had."""

    @property
    def status(self) -> int:
        """The exit status by the convention of shells."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def is_failure(self) -> bool:
        """Whether the program ended neither well nor because it was asked to stop."""
        return bool(self.overdue) or (self.code != 0 and self.code not in _STOPPED and not self.by_supervisor)

    @property
    def gave_up_at(self) -> float:
        """When it stopped training: of ranks that fail together, the first of these is the cause, not the first to end.

        One with a traceback may take long to end. One that was killed says nothing, and on a busy machine the others
        miss it sooner than its supervisor does. An abort may itself be the answer to a peer that is gone, as with NCCL.
        """
        was_killed = self.code < 0 and not self.by_supervisor
        if (was_killed or self.code == 1) and self.traceback_at and self.time - self.traceback_at < _TRACEBACK_AGE_S:
            return self.traceback_at
        return self.time - _HEAD_START_S if was_killed and self.code != -signal.SIGABRT else self.time

    def __str__(self) -> str:
        if self.overdue:
            return self.overdue
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        name = _SIGNAL_NAMES.get(-self.code, f"signal {-self.code}")
        hint = " (the kernel does so when memory runs out)" if -self.code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"


class RankExits:
    """The exits of one attempt, as they come in."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._all: list[RankExit] = []

    def add(self, exit: RankExit) -> None:
        self._all.append(exit)

    @property
    def are_all_in(self) -> bool:
        """Whether every rank of this machine has ended."""
        return len(self._all) >= self._size

    @property
    def failure(self) -> RankExit | None:
        """The first rank that failed; others often fail in its wake, and say so."""
        failed = {exit.rank: exit for exit in self._all if exit.is_failure}
        causes = [exit for exit in failed.values() if exit.blamed not in failed] or failed.values()
        return min(causes, key=lambda exit: exit.gave_up_at, default=None)

    @property
    def was_stopped(self) -> bool:
        """Whether ranks ended because they were asked to, and none failed."""
        return self.failure is None and any(exit.code for exit in self._all)

    @property
    def status(self) -> int:
        """The exit status of the first rank that ended with another one than 0."""
        first = min((exit for exit in self._all if exit.code), key=lambda exit: exit.gave_up_at, default=None)
        return 0 if first is None else first.status
