"""What only Linux does for the processes of a run. Elsewhere these functions do nothing."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys

ENABLED = sys.platform == "linux"

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MAX_NAME = 15
_MADV_COLLAPSE = 25
_HUGE_PAGE = 1 << 21


def missing_guarantees() -> str | None:
    """Return what this system cannot guarantee for trials that run in processes of their own; None on Linux."""
    if ENABLED:
        return None
    return (
        f"On {sys.platform} a process that a trial has started and left behind may go on after the trial, and a trial "
        "whose supervising process is killed may too. Linux ends both."
    )


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent`, which started it, ends.

    To the kernel the parent is the thread that started this process, so that thread has to live as long.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def outlive_parent() -> None:
    """Undo `end_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(0))


def adopt_orphans() -> None:
    """Become the parent of every process further down whose own parent has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def children() -> set[int]:
    """Return the ids of this process's children, also of those that have ended and are not waited for yet.

    Where orphans are not adopted, of everything further down.
    """
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=not ENABLED)}


def set_name(name: str) -> None:
    """Name this process as `ps -o comm` and `top` show it."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:_MAX_NAME]))


def use_huge_pages() -> None:
    """Move the memory of this process into huge pages, as far as possible: a fork then takes a third of the time."""
    if not ENABLED:
        return
    madvise = _libc().madvise
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        regions = [line.split() for line in file]
    for addresses, access, *_, name in (region if len(region) > 5 else [*region, ""] for region in regions):
        if access == "rw-p" and name in ("", "[heap]"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-begin // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)


def _prctl(option: int, value: ctypes.c_ulong | ctypes.c_char_p) -> None:
    if ENABLED:
        _libc().prctl(option, value, *[ctypes.c_ulong(0)] * 3)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
