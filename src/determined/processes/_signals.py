"""Signals as something to wait for."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Self


class SignalPipe:
    """Makes the numbers of signals readable, in place of what they would do. For the main thread."""

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._before_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # A signal that this process was told to ignore, as by nohup, stays ignored.
        handled = [which for which in signals if signal.getsignal(which) != signal.SIG_IGN]
        self._before = {which: signal.signal(which, _do_nothing) for which in handled}

    def fileno(self) -> int:
        """Return what becomes readable when a signal comes."""
        return self._reader

    def read(self) -> bytes:
        """Return the numbers of the signals that have come, one byte each; 0 is that of `wake`."""
        try:
            return os.read(self._reader, 4096)
        except BlockingIOError:
            return b""

    def wake(self) -> None:
        """Make 0 readable. Any thread may call this."""
        with contextlib.suppress(OSError):  # closed, or full and readable anyway
            os.write(self._writer, b"\0")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for which, handler in self._before.items():
            signal.signal(which, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._before_fd)
        os.close(self._reader)
        os.close(self._writer)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Let signals wait for the end of the block, or for `reset_signals` in a process that is forked within.

    That process would otherwise treat one as its parent does, and lose it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reset_signals() -> None:
    """Treat signals as a new Python process does."""
    signal.set_wakeup_fd(-1)
    for which in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # Python ignores these two in favour of errors that can be caught.
        usual = signal.SIG_IGN if which in (signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_DFL
        signal.signal(which, signal.default_int_handler if which == signal.SIGINT else usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _do_nothing(*_: object) -> None:
    """Take the place of the default, which would end the process."""
