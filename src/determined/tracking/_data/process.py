"""Processes of this and other machines, which are distinguished from later ones with the same id."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from determined._processes import ProcessIdentity, is_supported

# Boot time, on which creation times rest, is known to within a second or so.
_START_TOLERANCE = 2.0
CLAIMED_FOR_S = 60.0
"""Seconds for which a runner claims an experiment, and renews that claim well before."""
CLOCK_TOLERANCE_S = 60.0
"""Seconds by which the clocks of machines may differ."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """A process on some machine: one that trains, supervises or runs something that is on record.

    Older databases, and systems other than Linux, have no identity: there the host name and the time of the start
    tell, which steps of the clock and new names of the host make wrong.
    """

    pid: int
    started: float = 0.0  # psutil's create_time, where there is no identity
    host: str  # as socket.gethostname() says; with an identity only for people
    identity: ProcessIdentity | None = None
    alive_until: float | None = dataclasses.field(default=None, compare=False)
    """Of a runner or the holder of a slot: the end of its claim or lease unless that is renewed; seconds since 1970."""

    @classmethod
    def current(cls) -> RunProcess:
        """Return the process that asks."""
        return _current(os.getpid())

    @classmethod
    def of(cls, pid: int) -> RunProcess:
        """Return a living process of this machine; `ProcessLookupError` if there is none with that id."""
        if is_supported():
            return cls(pid=pid, host=socket.gethostname(), identity=ProcessIdentity.of(pid))
        import psutil

        try:
            started = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess as error:
            raise ProcessLookupError(f"there is no process {pid}.") from error
        return cls(pid=pid, host=socket.gethostname(), started=started)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads back, without `alive_until`."""
        identity = None if self.identity is None else self.identity.to_json()
        return {"pid": self.pid, "started": self.started, "host": self.host, "identity": identity}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunProcess:
        """Return the process that `to_json` described."""
        identity = None if value["identity"] is None else ProcessIdentity.from_json(value["identity"])
        return cls(pid=int(value["pid"]), started=float(value["started"]), host=str(value["host"]), identity=identity)

    @property
    def is_here(self) -> bool:
        """Whether its id means the same to this process, so that it can be looked for."""
        return self.host == socket.gethostname() if self.identity is None else self.identity.is_here

    @property
    def is_gone(self) -> bool:
        """Whether it has ended.

        Other machines and containers cannot be asked: there a process counts as gone a while after its claim or lease
        has expired; one without any never does.
        """
        if self.identity is not None:
            return self.identity.is_gone or (not self.is_here and self._has_expired)
        if not self.is_here:
            return self._has_expired
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
        """Return whether both are one process."""
        if self.identity is not None or other.identity is not None:
            return self.identity == other.identity
        return self.pid == other.pid and self.host == other.host and self._began_at(other.started)

    @property
    def _has_expired(self) -> bool:
        return self.alive_until is not None and time.time() > self.alive_until + CLOCK_TOLERANCE_S

    def _began_at(self, timestamp: float) -> bool:
        return abs(timestamp - self.started) <= _START_TOLERANCE


@functools.lru_cache(maxsize=1)
def _current(pid: int) -> RunProcess:
    # By pid, so that a forked process does not pass for its parent.
    return RunProcess.of(pid)
