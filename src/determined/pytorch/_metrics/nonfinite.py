"""Warnings for metrics that are not finite, or not numbers."""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Mapping
from numbers import Real
from typing import Any

from determined.core.metrics import BatchColumns, are_floats, as_array

logger = logging.getLogger("determined.pytorch")


class FiniteWatch:
    """Warns once for each metric that becomes NaN or infinite, and for each that is not a number, with the batch."""

    def __init__(self, is_chief: bool) -> None:
        self._warn = logger.warning if is_chief else logger.debug  # all ranks have the same metrics
        self._warned_not_finite: set[str] = set()
        self._warned_no_number: set[str] = set()

    def check_batches(self, batches: BatchColumns, last_batch: int) -> None:
        """Check the training metrics of the batches up to number `last_batch`."""
        first = last_batch - len(batches) + 1
        for name, values in batches.columns.items():
            # Checking the sum is much faster than checking each value.
            if name in self._warned_not_finite or (are_floats(values) and math.isfinite(sum(values))):
                continue
            bad = next((i for i, value in enumerate(values) if _is_bad(value)), None)
            if bad is not None:
                self._warn_not_finite("training", name, values[bad], first + bad)

    def recordable(self, kind: str, metrics: Mapping[str, Any], batch: int) -> dict[str, Any]:
        """Check the metrics of a validation or a window of training. Return them with None for what is not a number.

        The user's reducers may also return arrays, lists and mappings of numbers.
        """
        for name, value in metrics.items():
            if name not in self._warned_not_finite and _is_bad(value):
                self._warn_not_finite(kind, name, value, batch)
            elif name not in self._warned_no_number and not _holds_numbers(value):
                self._warned_no_number.add(name)
                self._warn(
                    "The %s metric %r is not a number at batch %d: %s. It is recorded as None, and training continues; "
                    "return numbers, or lists or arrays of numbers that keep their shape. Later cases are not "
                    "logged.",
                    kind,
                    name,
                    batch,
                    reprlib.repr(value),
                )
        return {name: value if _holds_numbers(value) else None for name, value in metrics.items()}

    def _warn_not_finite(self, kind: str, name: str, value: float, batch: int) -> None:
        self._warned_not_finite.add(name)
        self._warn(
            "The %s metric %r is %s at batch %d; it is recorded as such, and training continues. Later cases of this "
            "metric are not logged.",
            kind,
            name,
            value,
            batch,
        )


def _is_bad(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_holds_numbers, value.values()))
    return isinstance(value, Real) or as_array(value) is not None
