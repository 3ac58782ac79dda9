"""JSON that can hold any value: non-finite numbers are written as strings, other objects as their `str()`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_ESCAPE = "\\"
# Python refuses to write integers beyond 4300 decimal digits; this many bits stay well below.
_MAX_BITS = 8192


def encode_json(value: Any, *, indent: int | None = None) -> str:
    """Return valid JSON in ASCII for any value, to be read by people and programs.

    NaN and the infinities become the strings "NaN", "Infinity" and "-Infinity"; arrays, tensors and their
    scalars become lists and numbers; what JSON cannot hold becomes its `str()`.
    """
    return json.dumps(_storable(value, str), indent=indent, allow_nan=False)


def encode_document(value: Any) -> str:
    """Return the JSON of a column: as `encode_json`, but strings that spell non-finite numbers are escaped."""
    return json.dumps(_storable(value, _escaped), allow_nan=False)


def decode_document(text: str) -> Any:
    """Return the value that `encode_document` wrote."""
    return _restored(json.loads(text))


def as_stored(value: Any) -> Any:
    """Return a copy of a value as it comes back from the record."""
    return decode_document(encode_document(value))


def _storable(value: Any, text: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _MAX_BITS else hex(value)
    if isinstance(value, float):
        return _storable_float(value)
    if isinstance(value, Mapping):
        return {str(key): _storable(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_storable(item, text) for item in value]
    tolist = getattr(value, "tolist", None)
    return _storable(tolist(), text) if callable(tolist) and not isinstance(value, type) else str(value)


def _storable_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _escaped(text: str) -> str:
    return _ESCAPE + text if text.lstrip(_ESCAPE) in _NON_FINITE else text


def _unescaped(text: str) -> str | float:
    if text in _NON_FINITE:
        return _NON_FINITE[text]
    return text[1:] if text.startswith(_ESCAPE) and text.lstrip(_ESCAPE) in _NON_FINITE else text


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _unescaped(value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
