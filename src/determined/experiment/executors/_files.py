"""Small JSON files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from determined._home import private_opener


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Write a file aside, then give it its name; it is on the disk by then."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "w", encoding="utf-8", errors="replace", opener=private_opener) as file:
            json.dump(value, file, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """Return what a file holds; None if it is not there, or is not a map."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
