"""What Linux knows of processes, and how to end one for certain without ever hitting another."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
import select
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_NAME_LENGTH = 15
_NO_VARIABLES = b"\0"


class Facts(NamedTuple):
    """What the kernel says of one process."""

    pid: int
    state: str
    parent: int
    session: int
    start: int
    """In clock ticks since the boot."""


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """One process of one boot of the machine; its id alone may be another's later."""

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Return that of a living process."""
        facts = facts_of(pid)
        if facts is None:
            raise ProcessLookupError(f"there is no process {pid}.")
        return cls(pid, facts.start, boot_id())

    @property
    def lives(self) -> bool:
        """Whether this very process still runs."""
        facts = facts_of(self.pid) if self.boot == boot_id() else None
        return facts is not None and facts.start == self.start and facts.state not in "ZX"

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

    @contextlib.contextmanager
    def _handle(self) -> Iterator[int | None]:
        """Give what refers to the process also after its id has become another's; None if it is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            # Checked afterwards: the handle is of whichever process had the id when it was opened.
            yield handle if self.lives else None
        finally:
            os.close(handle)


@functools.cache
def boot_id() -> str:
    """Return what differs from one boot of the machine to the next."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def facts_of(pid: int) -> Facts | None:
    """Return what is known of a process; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything.
    fields = text[text.rindex(b")") + 2 :].split()
    return Facts(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


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
    leader = facts_of(keeper.pid)
    # Another process with the keeper's id would lead a session of the same number.
    is_same_session = keeper.boot == boot_id() and (leader is None or leader.start == keeper.start)
    for facts in all_processes():
        if facts.pid == os.getpid() or facts.state in "ZX":
            continue
        variables = first_variables(facts.pid)
        is_marked = common in variables or variables == _NO_VARIABLES
        if own in variables or (is_same_session and facts.session == keeper.pid and is_marked):
            yield Identity(facts.pid, facts.start, boot_id())


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
