"""Reading the small files of a checkpoint that nobody has verified."""

from __future__ import annotations

import json
import os
import pathlib
import reprlib
import stat
from typing import Any

LARGEST = 64 << 20
"""Bytes of the largest description or metadata that is read into memory."""


def read_plain(path: pathlib.Path) -> bytes:
    """Return the contents of a plain file; raises `ValueError` for a link, a pipe, a device, or one too large."""
    # A pipe would be waited for without O_NONBLOCK.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a plain file")
        if found.st_size > LARGEST:
            raise ValueError(f"it has {found.st_size} bytes, and the most that is read is {LARGEST}")
        return file.read(LARGEST)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the mapping in a plain JSON file; raises `OSError` or `ValueError` for any other contents."""
    try:
        value = json.loads(read_plain(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it holds {reprlib.repr(value)}, not a mapping")
    return value
