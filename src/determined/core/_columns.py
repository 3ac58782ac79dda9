"""The metrics of neighbouring batches, by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

MISSING: Final = object()
"""Stands where a batch does not have a metric."""


class BatchColumns(Sequence[Mapping[str, Any]]):
    """Metrics of batches as one column a name. Reads as a list of dicts, which is made only when asked for."""

    def __init__(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        self.columns = columns
        """The values of each metric, one a batch; `MISSING` for a batch that has none."""
        self._count = count

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> BatchColumns:
        """Return the columns of a list of dicts."""
        names = dict.fromkeys(name for row in rows for name in row)
        return cls({name: [row.get(name, MISSING) for row in rows] for name in names}, len(rows))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(self._count):
            yield {name: values[i] for name, values in self.columns.items() if values[i] is not MISSING}


def as_float(value: Any) -> float:
    """Return a number as a float; one beyond the largest is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
