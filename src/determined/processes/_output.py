"""Read what a child writes, line by line."""

from __future__ import annotations

import abc
import os
import re
import time
from collections.abc import Iterable

MAX_LINE = 1 << 20
"""Bytes after which a line is cut in two."""
TRACEBACK = "Traceback (most recent call last):"

_CHUNK = 1 << 16
_MAX_LEFT = 1 << 24
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
# What a rank writes that ends because of another one; see `determined.core`.
_BLAME = re.compile(rb"Rank \d+ stops because of rank (\d+)")


class LineCutter:
    """Cuts bytes into lines with their ends. A carriage return ends one too, as in progress bars.

    A line that is too long comes in pieces, cut between characters.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now."""
        data = self._rest + data
        # A carriage return at the very end may be the first half of a line end.
        cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        *pieces, self._rest = _pieces(data[cut:])
        return [piece for line in _LINE.findall(data[:cut]) for piece in _pieces(line)] + pieces

    def end(self) -> list[bytes]:
        """Return the last line, if it had no end."""
        rest, self._rest = self._rest, b""
        return [rest.removesuffix(b"\r")] if rest else []


def prefixed(prefix: bytes, lines: Iterable[bytes]) -> bytes:
    """Return lines behind a prefix each, with an end where they have none."""
    return b"".join(prefix + line + (b"" if line.endswith((b"\r", b"\n")) else b"\n") for line in lines)


class Output(abc.ABC):
    """One stream of a child, from its pipe to wherever a subclass writes it."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self.pipe = pipe
        self._cutter = LineCutter()
        self.traceback_at: float | None = None
        """When the last traceback of Python began, by the monotonic clock."""
        self.blamed: int | None = None
        """The rank because of which this one says it ends."""

    @abc.abstractmethod
    def write(self, lines: list[bytes]) -> None:
        """Store or show complete lines."""

    def write_last(self, lines: list[bytes]) -> None:
        """Store or show the last line, which had no end, if there is one."""
        self.write(lines)

    def copy(self) -> int:
        """Pass on what there is; returns the number of bytes, 0 if nothing more will come, -1 if more may."""
        try:
            data = os.read(self.pipe, _CHUNK)
        except BlockingIOError:
            return -1
        lines = self._cutter.feed(data)
        if any(TRACEBACK.encode() in line for line in lines):
            self.traceback_at = time.monotonic()
        for found in filter(None, map(_BLAME.search, lines)):
            self.blamed = int(found[1])
        self.write(lines)
        return len(data)

    def drain(self) -> None:
        """Pass on all that was written until now, also a last line without an end."""
        left = _MAX_LEFT  # not for ever, as a process that got away may go on writing
        while left > 0 and (count := self.copy()) > 0:
            left -= count
        self.write_last(self._cutter.end())


def _pieces(line: bytes) -> list[bytes]:
    """Return a line in parts that are not too long; an empty one is one part."""
    pieces = []
    while len(line) > MAX_LINE and len(line.rstrip(b"\r\n")) > MAX_LINE:
        cut = MAX_LINE
        while cut > MAX_LINE - 4 and line[cut] & 0xC0 == 0x80:  # within a character
            cut -= 1
        pieces.append(line[:cut])
        line = line[cut:]
    return [*pieces, line]
