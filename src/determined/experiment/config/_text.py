"""How keys and values of a config are shown to people."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from determined._text import plain
from determined.experiment.config._section import Path

_PLAIN_KEY = re.compile(r"[\w-]+")
_MAX_LENGTH = 80
_MAX_BITS = 256  # Python refuses to write much longer numbers in digits


def spelled(path: Path) -> str:
    """Return a path as people write it: `searcher.max_trials`, `labels[2]`."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += f".{key if _PLAIN_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)}"
    return text.removeprefix(".")


def shown(value: Any) -> str:
    """Return a value as one line of limited length."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"a number of about {value.bit_length() * 3 // 10} digits"
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, TypeError, RecursionError):
        text = f"a {type(value).__name__}"
    return plain(text, _MAX_LENGTH)


def in_yaml(value: Any) -> str:
    """Return a value as it is written on one line of YAML."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {in_yaml(its)}' for name, its in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(in_yaml(item) for item in value)}]"
    return value if isinstance(value, str) else json.dumps(value)


def nearest(word: object, words: Sequence[str]) -> str | None:
    """Return the most similar of some words; None if none is similar."""
    found = difflib.get_close_matches(str(word).lower(), {its.lower(): its for its in words}, 1, 0.6)
    return next((its for its in words if found and its.lower() == found[0]), None)


def any_of(words: Iterable[str]) -> str:
    """Return words as a list with `or` before the last one."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
