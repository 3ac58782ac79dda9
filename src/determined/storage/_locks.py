"""Locks on folders: they end with the process that took them, whatever processes it leaves behind.

They hold among the processes of one kernel, in whatever container; not among machines that share a file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
import threading
from collections.abc import Iterator

from determined._processes import boot_id, is_supported

_held: set[int] = set()
_changing = threading.Lock()


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Hold the lock of a folder, once nobody else does; this process lets go of it by dying, too."""
    with _changing:
        descriptor = os.open(folder, os.O_RDONLY)
        _held.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        _close(descriptor)


def is_locked(folder: pathlib.Path) -> bool:
    """Say whether a living process holds the lock of a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def kernel_id() -> str:
    """Return what differs between machines, and from one boot of a machine to the next."""
    return boot_id() if is_supported() else socket.gethostname()


def _close(descriptor: int) -> None:
    with _changing:
        if descriptor in _held:  # not in a forked process that goes on with the block
            _held.remove(descriptor)
            os.close(descriptor)


def _let_go() -> None:
    """Close, in a process just forked, the locks of its parent: else they would last for as long as it lives."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()
    _changing.release()


# No fork while a lock is opened or closed, so that the child closes just what it has inherited.
os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_let_go)
