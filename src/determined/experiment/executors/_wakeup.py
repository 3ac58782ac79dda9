"""Signals as something to select on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


def woken_by(*signals: signal.Signals) -> int:
    """Return what can be read from when one of the signals has come: the number of each, as a byte."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for which in signals:
        signal.signal(which, _do_nothing)
    return reader


def heard(reader: int) -> bytes:
    """Return the numbers of the signals that have come."""
    try:
        return os.read(reader, 4096)
    except BlockingIOError:
        return b""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let signals wait for the end of the block, or for `forget_signals` in a process that is forked within.

    It would else treat one as its parent does, and lose it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def forget_signals() -> None:
    """Treat signals as a process does that was just started: each one as the system would, an interrupt as Python."""
    signal.set_wakeup_fd(-1)
    for which in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # Python ignores these two in favour of errors that can be caught.
        usual = signal.SIG_IGN if which in (signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_DFL
        signal.signal(which, signal.default_int_handler if which == signal.SIGINT else usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _do_nothing(*_: object) -> None:
    """Take the place of the default, which would end the process."""
