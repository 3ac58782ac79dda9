"""Text for a terminal."""

from __future__ import annotations

import zlib
from typing import Any

LOG_FORMAT = "%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s"
"""A format for `logging.basicConfig` that tells processes apart."""


def plain(value: Any, limit: int | None = None) -> str:
    """Return text for a terminal, cut to a length if one is given: control characters appear as their escapes."""
    text = str(value)
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def plain_lines(value: Any, limit: int | None = None) -> str:
    """Return text of several lines for a terminal, cut to a length if one is given; its lines stay lines."""
    text = str(value)
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return "\n".join(plain(line.expandtabs()) for line in text.split("\n"))


def bounded(text: str, limit: int) -> str:
    """Return a name of limited length: the end of a longer one is replaced by the checksum of the whole."""
    if len(text) <= limit:
        return text
    return f"{text[: limit - 10]}… {zlib.crc32(text.encode(errors='backslashreplace')):08x}"
