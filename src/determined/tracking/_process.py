"""Which process did or does something, so that it can be told from a later one with the same id."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket

# Boot time, on which creation times rest, is known to within a second or so.
_START_TOLERANCE = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """A process on some machine: one that trains, keeps or runs something that is on record."""

    pid: int
    started: float  # psutil's create_time: a pid alone may belong to another process later
    host: str  # as socket.gethostname() says

    @classmethod
    def current(cls) -> RunProcess:
        """Return the process that asks."""
        return _process(os.getpid())

    @property
    def is_here(self) -> bool:
        """Whether it ran on this host, so that it can be looked for."""
        return self.host == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """Whether it ran on this host and has ended; False for other hosts, which cannot be asked."""
        if not self.is_here:
            return False
        import psutil

        try:
            process = psutil.Process(self.pid)
            if not self._began_at(process.create_time()):
                return True
            return bool(process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False

    def is_same(self, other: RunProcess) -> bool:
        """Return whether both are one process, whose start may have been measured twice."""
        return self.pid == other.pid and self.host == other.host and self._began_at(other.started)

    def _began_at(self, moment: float) -> bool:
        return abs(moment - self.started) <= _START_TOLERANCE


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> RunProcess:
    # By pid, so that a forked process does not pass for its parent.
    import psutil

    return RunProcess(pid=pid, started=psutil.Process(pid).create_time(), host=socket.gethostname())
