"""Store the output of one rank: every line with its time and stream, as it comes."""

from __future__ import annotations

import collections
import datetime
import itertools
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable

from determined._packages import explained
from determined.experiment.executors._lines import LineCutter

STREAMS = ("stdout", "stderr")
_CHUNK = 1 << 16
_MOST_LEFT = 1 << 24
_LAST_LINES = 100
_LONGEST_LAST_LINE = 1000
_MOST_DETAILS = 20
_TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(r"\[rank=?\d+\]:? ")  # as launchers put it before each line


def stamp(moment: float) -> str:
    """Return a time as it stands before each line: UTC, with microseconds, always of the same length."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LogFile:
    """The file of one rank's lines, `<time>\\t<stream>\\t<text>`. What cannot be written is left out, and counted."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._is_torn = False
        self._lost = 0

    def write(self, stream: str, lines: list[str]) -> None:
        """Add lines that came now."""
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
        """Let go of the file."""
        os.close(self._file)

    def _put(self, data: bytes) -> bool:
        try:
            while data:
                data = data[os.write(self._file, data) :]
                self._is_torn = bool(data)
        except OSError:  # a full disk is no reason to lose a training
            return False
        return True


class Output:
    """One stream of a rank, from its pipe to its file."""

    def __init__(self, pipe: int, stream: str, file: LogFile, look: Callable[[Iterable[str]], None]) -> None:
        os.set_blocking(pipe, False)
        self.pipe = pipe
        self._stream = stream
        self._file = file
        self._look = look
        self._cutter = LineCutter()
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self.traceback_at: float | None = None
        """When the last traceback of Python was begun, by the monotonic clock."""

    def copy(self) -> int:
        """Store what there is; returns the number of bytes, 0 if nothing more will come."""
        try:
            data = os.read(self.pipe, _CHUNK)
        except BlockingIOError:
            return -1
        self.say(self._cutter.feed(data, time.monotonic()) if data else self._cutter.end())
        return len(data)

    def drain(self) -> None:
        """Store all that was written until now, also a last line without an end."""
        left = _MOST_LEFT  # not for ever, as a process that got away may go on writing
        while left > 0 and (count := self.copy()) > 0:
            left -= count
        self.say(self._cutter.end())

    def say(self, lines: list[str]) -> None:
        """Add lines to what the rank wrote."""
        self._file.write(self._stream, lines)
        self.last_lines.extend(line[:_LONGEST_LAST_LINE] for line in lines[-_LAST_LINES:])
        if any(_TRACEBACK in line for line in lines):
            self.traceback_at = time.monotonic()
        self._look(lines)


def gist(lines: Iterable[str]) -> str:
    """Return what to show of an error output: the exception that the last traceback ends with, else the last line.

    Indented lines that follow belong to the exception, as those of the problems that torch lists.
    """
    lines = [_RANK.sub("", line, count=1).rstrip() for line in lines if line.strip()]
    if _TRACEBACK in lines:
        begin = len(lines) - lines[::-1].index(_TRACEBACK)
        inside = itertools.takewhile(_is_indented, lines[begin:])
        at = begin + sum(1 for _ in inside)
        if at < len(lines):
            details = itertools.takewhile(_is_indented, lines[at + 1 : at + _MOST_DETAILS])
            return "\n".join([explained(lines[at]), *details])
    return lines[-1] if lines else ""


def _is_indented(line: str) -> bool:
    return line[:1].isspace()
