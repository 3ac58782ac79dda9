"""Which process is meant, and whether it still runs: answers that hold after a step of the clock.

A process id alone may belong to another process later, creation times in seconds since 1970 move with the clock, and
host names change. The kernel counts start times in ticks since the boot, so these identify a process of one boot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
_MACHINE_ID = pathlib.Path("/etc/machine-id")
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # a constant of the kernel: containers have others


class Facts(NamedTuple):
    """What the kernel says of one process."""

    pid: int
    state: str
    parent: int
    session: int
    start: int
    """In clock ticks since the boot."""

    @property
    def has_ended(self) -> bool:
        """Whether only its exit status is left."""
        return self.state in "ZX"


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot of one machine; Linux only."""

    pid: int
    start: int
    boot: str
    namespace: str = ""
    """Where its id and start count. Empty if not recorded, then taken to be the same as here."""
    machine: str = ""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the identity of a living process; `ProcessLookupError` if there is none with that id."""
        facts = facts_of(pid)
        if facts is None:
            raise ProcessLookupError(f"there is no process {pid}.")
        return cls(pid, facts.start, boot_id(), _namespace(), _machine())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_json` gave; `KeyError`, `TypeError` or `ValueError` if it is none of that."""
        texts = (str(value["boot"]), str(value.get("namespace", "")), str(value.get("machine", "")))
        return cls(int(value["pid"]), int(value["start"]), *texts)

    def to_json(self) -> dict[str, int | str]:
        """Return the identity as values for JSON."""
        return dataclasses.asdict(self)

    @property
    def is_here(self) -> bool:
        """Whether its id means the same to this process, so that it can be looked for."""
        return self.boot == boot_id() and self.namespace in ("", _namespace())

    @property
    def is_gone(self) -> bool:
        """Whether it has certainly ended; False for other machines and containers, which cannot be asked."""
        if self.is_here:
            facts = facts_of(self.pid)
            return facts is None or facts.start != self.start or facts.has_ended
        return self.boot != boot_id() and self.machine == _machine() != ""


def is_supported() -> bool:
    """Return whether this system tells what an identity is made of."""
    return _BOOT_ID.exists()


@functools.cache
def boot_id() -> str:
    """Return what differs from one boot of the machine to the next, and is the same in all its containers."""
    return _BOOT_ID.read_text().strip()


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


def _namespace() -> str:
    """Return what is the same for all processes that see the same process ids and the same ticks."""
    return " ".join(filter(None, map(_namespace_of, ("pid", "time"))))


def _namespace_of(kind: str) -> str:
    with contextlib.suppress(OSError):  # kernels before 5.6 have no namespaces of time
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""


def _machine() -> str:
    """Return what stays the same when this machine boots again.

    That of a container is its host name: the file with the machine's id comes from an image that others may use too.
    """
    if _namespace_of("pid") == _FIRST_PID_NAMESPACE:
        with contextlib.suppress(OSError):
            if found := _MACHINE_ID.read_text().strip():
                return found
    return socket.gethostname()
