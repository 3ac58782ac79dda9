"""What Linux knows of processes, and how to end one for certain without ever hitting another."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import select
import signal
import time
from collections.abc import Iterator

from determined._processes import Facts, ProcessIdentity, facts_of

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_NAME_LENGTH = 15
_NO_VARIABLES = b"\0"


@dataclasses.dataclass(frozen=True, slots=True)
class Identity(ProcessIdentity):
    """One process of this machine, which can be sent signals and waited for."""

    @property
    def lives(self) -> bool:
        """Whether this very process still runs."""
        return self.is_here and not self.is_gone

    def send(self, signum: signal.Signals) -> bool:
        """Send a signal to this very process; returns whether it was there."""
        with self._handle() as handle:
            if handle is None:
                return False
            signal.pidfd_send_signal(handle, signum)
            return True

    def wait(self, timeout: float | None) -> bool:
        """Wait until this very process has ended, or so many seconds; returns whether it has."""
        with self._handle() as handle:
            if handle is None:
                return True
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            return bool(poll.poll(None if timeout is None else max(0.0, timeout) * 1000))

    def open(self) -> int | None:
        """Return a descriptor that is readable once this very process has ended, for the caller to close.

        It refers to the process also after its id has become another's; None if it is gone.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        # Checked afterwards: the handle is of whichever process had the id when it was opened.
        if self.lives:
            return handle
        os.close(handle)
        return None

    @contextlib.contextmanager
    def _handle(self) -> Iterator[int | None]:
        handle = self.open()
        try:
            yield handle
        finally:
            if handle is not None:
                os.close(handle)


def all_processes() -> Iterator[Facts]:
    """Give the facts of every process that can be seen."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and (facts := facts_of(int(name))) is not None:
            yield facts


def children() -> set[int]:
    """Return the ids of this process's children, also of those that have ended and are not waited for yet."""
    me = os.getpid()
    return {facts.pid for facts in all_processes() if facts.parent == me}


def first_variables(pid: int) -> bytes:
    """Return the environment that a process was started with, as it is in memory.

    A process that is about to be gone has none any more; one that may not be looked at, not even that.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return _NO_VARIABLES + file.read()
    except ProcessLookupError:
        return _NO_VARIABLES
    except OSError:
        return b""


def sweep(keeper: Identity, own: str, common: str, timeout: float = 5.0) -> None:
    """Kill whatever is left of a run whose keeper is gone, and wait until it is.

    `own` and `common` are environment variables as `NAME=value`: that of the run's programs, and that of the process
    which its keeper was forked from. The latter has other runs as well, so it counts within the keeper's session only.
    """
    deadline = time.monotonic() + timeout
    marks = [f"\0{mark}\0".encode() for mark in (own, common)]
    while found := list(_members(keeper, *marks)):
        for member in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                member.send(signal.SIGKILL)
        if time.monotonic() > deadline:  # as one that waits for a disk that does not answer
            return
        time.sleep(0.01)


def _members(keeper: Identity, own: bytes, common: bytes) -> Iterator[Identity]:
    leader, here = facts_of(keeper.pid), Identity.of(os.getpid())
    # Another process with the keeper's id would lead a session of the same number.
    is_same_session = keeper.is_here and (leader is None or leader.start == keeper.start)
    for facts in all_processes():
        if facts.pid == os.getpid() or facts.has_ended:
            continue
        variables = first_variables(facts.pid)
        is_marked = common in variables or variables == _NO_VARIABLES
        if own in variables or (is_same_session and facts.session == keeper.pid and is_marked):
            yield dataclasses.replace(here, pid=facts.pid, start=facts.start)


def adopt_orphans() -> None:
    """Become the parent of every process further down whose own parent has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def call_this(name: str) -> None:
    """Name this process as `ps -o comm` and `top` show it."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:_NAME_LENGTH]))


def _prctl(option: int, value: ctypes.c_ulong | ctypes.c_char_p) -> None:
    _libc().prctl(option, value, *[ctypes.c_ulong(0)] * 3)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
