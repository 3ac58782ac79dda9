"""Locks on files. A lock ends with the process that took it, whatever child processes that leaves behind.

The lock of a path is the file `<path>.lock`: it exists while the lock is held, and names the holder. Among processes of
one kernel, in whatever container, `flock` decides. Machines that share a file system may not see each other's `flock`,
so a holder touches its file, and other machines respect it until it has not changed for a day.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pathlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

from determined._home import private_opener
from determined._processes import boot_id, is_supported

LOCK = ".lock"
OWNER = ".owner"
"""What earlier versions, which locked folders, put beside a folder."""

HEARTBEAT_S = 60.0
MAX_SILENCE_S = 24 * 3600.0
"""Seconds without a change after which the lock of another machine counts as left by a dead process."""

_held: set[io.FileIO] = set()
_changing = threading.Lock()


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Hold the lock of a path, once nobody else does. The path itself need not exist."""
    with _acquired(path, wait=True) as file, _touched(path):
        _write_holder(file)
        yield


def lock_if_free(path: pathlib.Path) -> contextlib.ExitStack | None:
    """Take the lock of a path, which closing the stack releases; None if another process holds it, or may."""
    if _is_held_elsewhere(path):
        return None
    with contextlib.ExitStack() as stack, contextlib.suppress(BlockingIOError):
        file = stack.enter_context(_acquired(path, wait=False))
        stack.enter_context(_touched(path))
        _write_holder(file)
        return stack.pop_all()
    return None


@contextlib.contextmanager
def shared(path: pathlib.Path) -> Iterator[None]:
    """Keep others from taking what a file stands for: see `unshared`. The file is made if it is not there."""
    while True:
        with open(path, "ab", opener=private_opener) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            if _is_at(path, file):
                os.utime(path)
                yield
                return


@contextlib.contextmanager
def unshared(path: pathlib.Path) -> Iterator[bool]:
    """Give whether nobody is in a `shared` block of a file; then nobody enters one during this block."""
    with open(path, "ab", opener=private_opener) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = _is_at(path, file)
        except BlockingIOError:
            is_free = False
        yield is_free
        if is_free:
            path.unlink(missing_ok=True)


def remove_abandoned(folder: pathlib.Path, *patterns: str) -> list[str]:
    """Remove the folders in a folder that match a pattern, with their locks, and return their names.

    Those whose lock a living process holds, or may hold on another machine, stay.
    """
    found = {path for pattern in patterns for end in ("", LOCK, OWNER) for path in folder.glob(pattern + end)}
    paths = {path.with_suffix("") if path.suffix in (LOCK, OWNER) else path for path in found}
    return sorted(path.name for path in paths if _remove_abandoned(path))


def _remove_abandoned(path: pathlib.Path) -> bool:
    """Return whether something abandoned was there."""
    if _is_held_elsewhere(path):
        return False
    try:
        with _acquired(path, wait=False):
            was_there = path.exists()  # it may have been completed meanwhile
            shutil.rmtree(path, ignore_errors=True)
            _beside(path, OWNER).unlink(missing_ok=True)
    except OSError:  # it is held, or cannot be removed
        return False
    return was_there


def kernel_id() -> str:
    """Return what differs between machines, and from one boot of a machine to the next."""
    return boot_id() if is_supported() else socket.gethostname()


def _beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_name(path.name + suffix)


@contextlib.contextmanager
def _acquired(path: pathlib.Path, *, wait: bool) -> Iterator[io.FileIO]:
    lock = _beside(path, LOCK)
    while True:
        with _opened(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if not _is_at(lock, file):  # the holder before has removed it
                continue
            try:
                yield file
            finally:
                if file in _held:  # not in a forked process that goes on with the block
                    with contextlib.suppress(OSError):
                        lock.unlink()
            return


@contextlib.contextmanager
def _opened(lock: pathlib.Path) -> Iterator[io.FileIO]:
    with _changing:
        file = io.FileIO(lock, "a+", opener=private_opener)
        _held.add(file)
    try:
        yield file
    finally:
        with _changing:
            _held.discard(file)
            file.close()


def _is_at(lock: pathlib.Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(lock.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _write_holder(file: io.FileIO) -> None:
    holder = {"kernel": kernel_id(), "host": socket.gethostname(), "pid": os.getpid()}
    file.truncate(0)
    file.write(json.dumps(holder).encode())
    os.fsync(file.fileno())  # after a power cut, an empty one would count as that of another machine


@contextlib.contextmanager
def _touched(path: pathlib.Path) -> Iterator[None]:
    """Show other machines that the lock of a path is held."""
    stopped = threading.Event()

    def touch() -> None:
        while not stopped.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(_beside(path, LOCK))

    thread = threading.Thread(target=touch, name="resolute-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _is_held_elsewhere(path: pathlib.Path) -> bool:
    """Return whether a process of another machine, or of an earlier version, may hold the lock of a path."""
    try:
        if _is_of_this_kernel(path):
            return False
        with tempfile.NamedTemporaryFile(dir=path.parent) as probe:  # for the clock of the file system
            now = os.fstat(probe.fileno()).st_mtime
        changed = [_beside(path, LOCK), _beside(path, OWNER), path, *path.rglob("*")]
        return now - max(one.lstat().st_mtime for one in changed if one.exists()) < MAX_SILENCE_S
    except (OSError, ValueError):  # something changes there
        return True


def _is_of_this_kernel(path: pathlib.Path) -> bool:
    """Return whether `flock` shows if the lock of a path is held: its holder is of this kernel, or there is no lock."""
    try:
        holder = json.loads(_beside(path, LOCK).read_bytes())
    except FileNotFoundError:
        return not _beside(path, OWNER).exists()
    except ValueError:
        return False
    return isinstance(holder, dict) and holder.get("kernel") == kernel_id()


def _let_go() -> None:
    """Close, in a process just forked, the locks of its parent: else they would last for as long as it lives."""
    for file in _held:
        file.close()
    _held.clear()
    _changing.release()


# No fork while a lock is opened or closed, so that the child closes just what it has inherited.
os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_let_go)
