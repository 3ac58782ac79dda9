"""Store the output of a rank: every line with its time and stream, as it comes."""

from __future__ import annotations

import collections
import os
import pathlib
import time
from collections.abc import Callable, Iterable

from determined.experiment.executors._logs import stamp
from determined.processes import Output

REWRITE_INTERVAL_S = 1.0
"""Seconds between two states of a line that is written over and over, as progress bars are."""
_LAST_LINES = 100
_MAX_LAST_LINE = 1000


class ScreenLines:
    """Turns lines into what a reader wants to see of them.

    Of a line that carriage returns rewrite, that is its last state, and one a second on the way to it: enough to follow
    a progress bar.
    """

    def __init__(self) -> None:
        self._hidden = b""
        self._shown_at: float | None = None

    def see(self, lines: Iterable[bytes], now: float) -> list[str]:
        """Return the lines to show; `now` is in seconds of a clock that never goes back."""
        shown: list[bytes] = []
        for line in lines:
            if line.endswith(b"\n"):
                shown += self._whole(line[:-1].removesuffix(b"\r"))
            elif line.endswith(b"\r"):
                shown += self._state(line[:-1], now)
            else:  # a piece of one that is too long
                shown.append(line)
        return [_text(line) for line in shown]

    def end(self, rest: list[bytes]) -> list[str]:
        """Return what to show of the last line, if it had no end."""
        last, self._hidden = b"".join(rest) or self._hidden, b""
        return [_text(last)] if last else []

    def _whole(self, line: bytes) -> list[bytes]:
        was_shown = self._shown_at is not None and not self._hidden
        last, self._hidden, self._shown_at = line or self._hidden, b"", None
        return [] if not line and was_shown else [last]

    def _state(self, state: bytes, now: float) -> list[bytes]:
        if not state:
            return []
        if self._shown_at is not None and now - self._shown_at < REWRITE_INTERVAL_S:
            self._hidden = state
            return []
        self._hidden, self._shown_at = b"", now
        return [state]


def _text(line: bytes) -> str:
    # Without this byte, the file counts as text for every tool that reads it.
    return line.decode("utf-8", "backslashreplace").replace("\0", "\\x00")


class LogFile:
    """The file of one rank's lines, `<time>\\t<stream>\\t<text>`. What cannot be written is left out, and counted."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._is_torn = False
        self._lost = 0

    def write(self, stream: str, lines: list[str]) -> None:
        if not lines:
            return
        head = f"{stamp(time.time())}\t"
        text = "".join(f"{head}{stream}\t{line}\n" for line in lines)
        if self._lost:
            text = f"{head}stderr\t[{self._lost} lines of output are missing here: they could not be written]\n{text}"
        if self._is_torn:
            text = f"\n{text}"
        if self._put(text.encode()):
            self._lost = 0
        else:
            self._lost += len(lines)

    def close(self) -> None:
        os.close(self._file)

    def _put(self, data: bytes) -> bool:
        try:
            while data:
                data = data[os.write(self._file, data) :]
                self._is_torn = bool(data)
        except OSError:  # a full disk is no reason to lose a training
            return False
        return True


class LogOutput(Output):
    """One stream of a rank, from its pipe to its file; `check` sees every line."""

    def __init__(self, pipe: int, stream: str, file: LogFile, check: Callable[[Iterable[str]], None]) -> None:
        super().__init__(pipe)
        self._stream = stream
        self._file = file
        self._check = check
        self._screen = ScreenLines()
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)

    def write(self, lines: list[bytes]) -> None:
        self._store(self._screen.see(lines, time.monotonic()))

    def write_last(self, lines: list[bytes]) -> None:
        self._store(self._screen.end(lines))

    def _store(self, lines: list[str]) -> None:
        self._file.write(self._stream, lines)
        self.last_lines.extend(line[:_MAX_LAST_LINE] for line in lines[-_LAST_LINES:])
        self._check(lines)
