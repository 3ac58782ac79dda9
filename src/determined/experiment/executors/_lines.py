"""Cut what a process writes into lines of text."""

from __future__ import annotations

from collections.abc import Iterator

LONGEST_LINE = 1 << 20
"""Bytes after which a line is cut in two."""
BETWEEN_REWRITES = 1.0
"""Seconds between two states of a line that is written over and over, as progress bars are."""


class LineCutter:
    """Turns bytes into whole lines.

    Of a line that carriage returns take back there is its last state, and one a second on the way to it: enough to
    follow a progress bar.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._taken_back = b""
        self._shown_at: float | None = None

    def feed(self, data: bytes, now: float) -> list[str]:
        """Return the lines that are whole now; `now` is in seconds of a clock that never goes back."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [text for line in whole for text in self._whole(line.removesuffix(b"\r"), now)]
        # A carriage return at the very end may be the first half of a line end.
        states, taken_back, current = rest[:-1].rpartition(b"\r")
        if taken_back:
            lines += self._states(states.split(b"\r"), now)
            rest = current + rest[-1:]
        *pieces, self._rest = _pieces(rest)
        return lines + [_text(piece) for piece in pieces]

    def end(self) -> list[str]:
        """Return the last line, if it had no end."""
        last, self._rest = self._rest.removesuffix(b"\r") or self._taken_back, b""
        self._taken_back = b""
        return [_text(last)] if last else []

    def _whole(self, line: bytes, now: float) -> Iterator[str]:
        *states, last = line.split(b"\r")
        yield from self._states(states, now)
        was_shown = self._shown_at is not None and not self._taken_back
        if not last and was_shown:
            self._shown_at = None
            return
        last, self._taken_back, self._shown_at = last or self._taken_back, b"", None
        yield from map(_text, _pieces(last))

    def _states(self, states: list[bytes], now: float) -> list[str]:
        """Return those of the states of a line that are to be seen."""
        shown = []
        for state in filter(None, states):
            self._taken_back = state
            if self._shown_at is None or now - self._shown_at >= BETWEEN_REWRITES:
                self._taken_back, self._shown_at = b"", now
                shown.append(_text(state))
        return shown


def _pieces(line: bytes) -> list[bytes]:
    """Return a line in parts that are not too long; an empty one is one part."""
    pieces = []
    while len(line) > LONGEST_LINE:
        cut = LONGEST_LINE
        while cut > LONGEST_LINE - 4 and line[cut] & 0xC0 == 0x80:  # within a character
            cut -= 1
        pieces.append(line[:cut])
        line = line[cut:]
    return [*pieces, line]


def _text(line: bytes) -> str:
    # A text that holds no such byte is one to every tool that reads the file.
    return line.decode("utf-8", "backslashreplace").replace("\0", "\\x00")
