"""The training length that the searcher asks for, in the form that old programs expect."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from determined import errors
from determined.core._distributed import DistributedContext


class SearcherMode(enum.Enum):
    """Which ranks may ask for operations."""

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"


class Unit(enum.Enum):
    """What a configured training length counts."""

    EPOCHS = "EPOCHS"
    RECORDS = "RECORDS"
    BATCHES = "BATCHES"


class SearcherOperation:
    """Train until `length` units are done, then report the searcher's metric."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.completed_metric: float | None = None

    def report_progress(self, length: float) -> None:
        """Say how many units are done."""
        if not length >= 0:
            raise ValueError(f"report_progress({length!r}): the units done so far cannot be negative.")

    def report_completed(self, searcher_metric: float) -> None:
        """End the operation with its validation metric."""
        if self.completed_metric is not None:
            raise RuntimeError("report_completed() was called twice for one operation.")
        self.completed_metric = float(searcher_metric)


class SearcherContext:
    """One operation of the configured `max_length`; deprecated, as searches no longer send lengths."""

    def __init__(self, distributed: DistributedContext, config: Mapping[str, Any] | None) -> None:
        self._distributed = distributed
        self._config = config or {}

    def operations(
        self, searcher_mode: SearcherMode = SearcherMode.WorkersAskChief, auto_ack: bool = True
    ) -> Iterator[SearcherOperation]:
        """Yield the one operation that leads to the configured training length."""
        warnings.warn(
            "core_context.searcher.operations() is deprecated: train to a length of your own and report "
            "validation metrics.",
            FutureWarning,
            stacklevel=2,
        )
        return self._operations(searcher_mode)

    def get_configured_units(self) -> Unit | None:
        """Return what the configured length counts; None for a bare number."""
        length = self._max_length()
        return Unit[next(iter(length)).upper()] if isinstance(length, Mapping) else None

    def _operations(self, mode: SearcherMode) -> Iterator[SearcherOperation]:
        if mode is SearcherMode.ChiefOnly and not self._distributed.is_chief:
            raise RuntimeError("In SearcherMode.ChiefOnly only the chief may ask for operations.")
        length = self._max_length()
        operation = SearcherOperation(next(iter(length.values())) if isinstance(length, Mapping) else length)
        yield operation
        if operation.completed_metric is None:
            raise RuntimeError("The operation ended without report_completed(); report its metric first.")

    def _max_length(self) -> Any:
        length = (self._config.get("searcher") or {}).get("max_length")
        if length is None:
            raise errors.InvalidExperimentException(
                "searcher.operations() needs `searcher: {max_length: ...}` in the experiment config."
            )
        return length
