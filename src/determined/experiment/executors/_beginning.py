"""Fork a process, and learn whether it could begin with what it is for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import traceback
from collections.abc import Callable
from typing import NoReturn

from determined._parent import end_with_parent
from determined.experiment.executors._wakeup import forget_signals, held_back

_BEGINNING = 3  # the file descriptor after those that every process has


class Beginning:
    """The child's side: tells the parent that it cannot begin, or nothing if it has begun."""

    def failed(self, message: str) -> None:
        """Say why there is nothing to wait for."""
        with contextlib.suppress(OSError):
            os.write(_BEGINNING, message.encode(errors="replace")[:4096])

    def done(self) -> None:
        """Say that the program is on its own from now on."""
        os.close(_BEGINNING)


@dataclasses.dataclass(frozen=True, slots=True)
class Forked:
    """The parent's side: the child, and what it writes."""

    pid: int
    stdout: int
    stderr: int
    beginning: int
    """Has what the child says of a failed beginning; ends when it has begun."""


def fork(body: Callable[[Beginning], None]) -> Forked:
    """Run `body` in a child with nothing open but its output, which ends when this process does."""
    parent = os.getpid()
    pipes = [os.pipe() for _ in range(3)]
    with held_back():
        pid = os.fork()
        if pid == 0:
            _run(parent, [writer for _, writer in pipes], body)
    for _, writer in pipes:
        os.close(writer)
    return Forked(pid, *(reader for reader, _ in pipes))


def _run(parent: int, writers: list[int], body: Callable[[Beginning], None]) -> NoReturn:
    try:
        _separate(parent, *writers)
        body(Beginning())
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(70)  # a body ends the process itself


def _separate(parent: int, stdout: int, stderr: int, beginning: int) -> None:
    end_with_parent(parent)
    # A group of its own, so that a program that signals its whole group reaches none but its own processes.
    os.setpgid(0, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.dup2(beginning, _BEGINNING, inheritable=False)
    os.closerange(_BEGINNING + 1, os.sysconf("SC_OPEN_MAX"))
    forget_signals()
