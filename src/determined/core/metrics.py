"""Metrics of batches as columns, and the numbers that stand for them. For the other packages of determined."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Final

import numpy as np


class _Missing(enum.Enum):
    """An enum, so that its only member keeps its identity when it is sent to another rank."""

    MISSING = enum.auto()


MISSING: Final = _Missing.MISSING
"""Stands for a metric that a batch does not have."""


POSITION_METRICS = ("batches", "epochs")
"""Metrics that count how far training has come. Other curves are drawn over them; they have none of their own."""


class BatchColumns(Sequence[Mapping[str, Any]]):
    """Metrics of batches, one column per name. Reads as a list of dicts, which are made only when asked for."""

    def __init__(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        self.columns = columns
        """The values of each metric, one per batch; `MISSING` for a batch that has none."""
        self._count = count

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> BatchColumns:
        """Return the columns of a list of dicts."""
        names = dict.fromkeys(name for row in rows for name in row)
        return cls({name: [row.get(name, MISSING) for row in rows] for name in names}, len(rows))

    @classmethod
    def interleaved(cls, parts: Sequence[BatchColumns]) -> BatchColumns:
        """Return the batches of all ranks in the order of the data: the first of each rank, the second of each..."""
        names = dict.fromkeys(name for part in parts for name in part.columns)
        merged, end = {}, object()
        for name in names:
            by_rank = [part.columns.get(name, [MISSING] * len(part)) for part in parts]
            rounds = itertools.zip_longest(*by_rank, fillvalue=end)
            merged[name] = [value for values in rounds for value in values if value is not end]
        return cls(merged, sum(map(len, parts)))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(self._count):
            yield {name: values[i] for name, values in self.columns.items() if values[i] is not MISSING}


def are_floats(values: Sequence[Any]) -> bool:
    """Return whether all values are Python floats, as those of nearly all metrics are."""
    return {*map(type, values)} == {float}


def as_float(value: Any) -> float:
    """Return a number as a float; infinity if it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return a number, an array or nested lists of numbers as one array; None for anything else.

    Empty lists and rows of different lengths give None. Integers too large for a float become infinite.
    """
    if not _holds_numbers(value):
        return None
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        return None
    if array.dtype.kind == "O" and all(isinstance(one, Real) for one in array.flat):
        array = np.array([as_float(one) for one in array.flat]).reshape(array.shape)
    return array if array.size and array.dtype.kind in "biuf" else None


def _holds_numbers(value: Any) -> bool:
    """Return whether a value is made of numbers only; NumPy would read every item of any object with a length."""
    if isinstance(value, list | tuple):
        return all(map(_holds_numbers, value))
    return isinstance(value, Real | np.ndarray | np.generic)


def as_number(value: Any) -> float | None:
    """Return the number that a curve shows for a metric: the mean of an array or list; None if it has none."""
    if isinstance(value, Real):
        return as_float(value)
    array = as_array(value)
    return None if array is None else float(mean_of(array))


def mean_of(array: np.ndarray[Any, Any], axis: int | None = None) -> Any:
    """Return the mean of all elements of an array, or of those along an axis, in double precision."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.mean(array, axis=axis, dtype=np.float64)
