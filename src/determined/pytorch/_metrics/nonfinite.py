"""Say when a metric stops being a finite number, or is none."""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from determined.core.metrics import BatchColumns, are_floats, as_array

logger = logging.getLogger("determined.pytorch")


class FiniteWatch:
    """Warns once for each metric that becomes NaN or infinite, and for each that is no number, with the batch."""

    def __init__(self, is_chief: bool) -> None:
        self._warn = logger.warning if is_chief else logger.debug  # all ranks have the same metrics
        self._told: set[str] = set()
        self._told_no_number: set[str] = set()

    def look_at_batches(self, batches: BatchColumns, last_batch: int) -> None:
        """Look at the training metrics of the batches that end with number `last_batch`."""
        first = last_batch - len(batches) + 1
        for name, values in batches.columns.items():
            if name in self._told or _are_finite(values):
                continue
            bad = next((i for i, value in enumerate(values) if _is_bad(value)), None)
            if bad is not None:
                self._tell("training", name, values[bad], first + bad)

    def recordable(self, kind: str, metrics: Mapping[str, Any], batch: int) -> dict[str, Any]:
        """Return the metrics of a validation, or of a window of training, as they are recorded: None for no number.

        Reducers of the user's own may also give arrays, lists and mappings of numbers.
        """
        for name, value in metrics.items():
            if name not in self._told and _is_bad(value):
                self._tell(kind, name, value, batch)
            elif name not in self._told_no_number and not _holds_numbers(value):
                self._tell_no_number(kind, name, value, batch)
        return {name: value if _holds_numbers(value) else None for name, value in metrics.items()}

    def _tell_no_number(self, kind: str, name: str, value: Any, batch: int) -> None:
        self._told_no_number.add(name)
        self._warn(
            "The %s metric %r is not a number at batch %d: %s. It is recorded as None, and training goes on; return "
            "numbers, or lists or arrays of numbers that keep their shape. Later cases are not announced.",
            kind,
            name,
            batch,
            reprlib.repr(value),
        )

    def _tell(self, kind: str, name: str, value: float, batch: int) -> None:
        self._told.add(name)
        self._warn(
            "The %s metric %r is %s at batch %d; it is recorded as such, and training goes on. Later ones of this "
            "metric are not announced.",
            kind,
            name,
            value,
            batch,
        )


def _are_finite(values: Sequence[Any]) -> bool:
    """Say whether a sum, which takes a fraction of the time of a look at each, shows that all values are finite."""
    return are_floats(values) and math.isfinite(sum(values))


def _is_bad(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_holds_numbers, value.values()))
    return isinstance(value, Real) or as_array(value) is not None
