"""JSON that can hold any metric: non-finite numbers travel as strings, other objects as text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# Python refuses to write integers beyond 4300 decimal digits; this many bits stay well below.
_MOST_BITS = 8192
_MOST_DIGITS = 2400  # fewer than an integer of that many bits has
_SIMPLE = {float, int, str, bool, type(None)}
_ENCODER = json.JSONEncoder(allow_nan=False)


def encode_json(value: Any, *, indent: int | None = None) -> str:
    """Return valid JSON in ASCII for any value.

    NaN and the infinities become the strings "NaN", "Infinity" and "-Infinity"; arrays, tensors and their
    scalars become lists and numbers; what JSON cannot hold becomes its `str()`.
    """
    if indent is not None:
        return json.dumps(_storable(value), indent=indent, allow_nan=False)
    return _simple_json(value) or _ENCODER.encode(_storable(value))


def _simple_json(value: Any) -> str | None:
    """Return the JSON of a flat dict that needs no conversion, as most metrics are; None for other values."""
    if (
        type(value) is not dict
        or not _SIMPLE.issuperset(map(type, value.values()))
        or not {str}.issuperset(map(type, value))
    ):
        return None
    try:
        text = _ENCODER.encode(value)
    except ValueError:  # a number that is not finite, or a very long one
        return None
    return text if len(text) <= _MOST_DIGITS else None


def decode_json(text: str) -> Any:
    """Return the value that `encode_json` wrote, with non-finite numbers as floats again."""
    return _restored(json.loads(text))


def _storable(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _MOST_BITS else hex(value)
    if isinstance(value, float):
        return _storable_float(value)
    if isinstance(value, Mapping):
        return {str(key): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return _storable_list(value)
    tolist = getattr(value, "tolist", None)
    return _storable(tolist()) if callable(tolist) and not isinstance(value, type) else str(value)


def _storable_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _storable_list(values: Iterable[Any]) -> list[Any]:
    return [_storable(item) for item in values]


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
