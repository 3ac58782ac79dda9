"""Say when a metric stops being a finite number."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from determined.core._columns import BatchColumns, are_floats

logger = logging.getLogger("determined.pytorch")


class FiniteWatch:
    """Warns once for each metric that becomes NaN or infinite, with the batch at which it did."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look_at_batches(self, batches: BatchColumns, last_batch: int) -> None:
        """Look at the training metrics of the batches that end with number `last_batch`."""
        first = last_batch - len(batches) + 1
        for name, values in batches.columns.items():
            if name in self._told or _are_finite(values):
                continue
            bad = next((i for i, value in enumerate(values) if _is_bad(value)), None)
            if bad is not None:
                self._tell("training", name, values[bad], first + bad)

    def look(self, kind: str, metrics: Mapping[str, Any], batch: int) -> None:
        """Look at the metrics of a validation, or of a window of training, after a number of batches."""
        for name, value in metrics.items():
            if name not in self._told and _is_bad(value):
                self._tell(kind, name, value, batch)

    def _tell(self, kind: str, name: str, value: float, batch: int) -> None:
        self._told.add(name)
        logger.warning(
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
