"""The training length that the searcher asks for, as older programs read it."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from determined import errors
from determined.core.distributed import DistributedContext

_LOCAL = {"searcher": {"max_length": {"epochs": 1}}}


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
    """Asks the program to train until `length` units are done, and then to report the searcher's metric."""

    def __init__(self, length: int, report_progress: Callable[[float], None]) -> None:
        self.length = length
        self.completed_metric: float | None = None
        self._report_progress = report_progress

    def report_progress(self, length: float) -> None:
        """Record how many of the units are done."""
        if not length >= 0:
            raise ValueError(f"report_progress({length!r}): the units done so far cannot be negative.")
        self._report_progress(min(length / self.length, 1.0))

    def report_completed(self, searcher_metric: float) -> None:
        """End the operation with its validation metric."""
        if self.completed_metric is not None:
            raise RuntimeError("report_completed() was called twice for one operation; report each metric once.")
        self.completed_metric = float(searcher_metric)


class SearcherContext:
    """One operation of the configured length; deprecated, as searches no longer send lengths.

    The length is the searcher's `max_length`, or its `max_time` if `time_metric` counts batches or epochs. Without a
    config (None, in a local run) it is one epoch.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        config: Mapping[str, Any] | None,
        report_progress: Callable[[float], None],
    ) -> None:
        self._distributed = distributed
        self._config = _LOCAL if config is None else config
        self._report_progress = report_progress

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
        return self._max_length()[0]

    def _operations(self, mode: SearcherMode) -> Iterator[SearcherOperation]:
        if mode is SearcherMode.ChiefOnly and not self._distributed.is_chief:
            raise errors.WrongRankError("In SearcherMode.ChiefOnly only the chief may ask for operations.")
        operation = SearcherOperation(self._max_length()[1], self._report_progress)
        yield operation
        if operation.completed_metric is None:
            raise RuntimeError("The operation ended without report_completed(); report its metric first.")

    def _max_length(self) -> tuple[Unit | None, int]:
        section = self._config.get("searcher")
        searcher: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
        length, time_metric = searcher.get("max_length"), searcher.get("time_metric")
        if length is None and time_metric in ("batches", "epochs"):
            length = {time_metric: searcher.get("max_time")}
        parsed = parse_length(length)
        if parsed is None or parsed[1] == 0:
            raise errors.InvalidExperimentException(
                f"searcher.max_length={length!r} in the experiment config is not a length; core_context.searcher needs "
                "{batches: n}, {epochs: n} or {records: n} with n of at least 1."
            )
        return parsed


def parse_length(value: Any) -> tuple[Unit | None, int] | None:
    """Return the unit and the count of a length in an experiment config, such as `{epochs: 3}`.

    The unit is None for a plain number. Returns None if the value is not a length.
    """
    ((unit, count),) = value.items() if isinstance(value, Mapping) and len(value) == 1 else [(None, value)]
    is_known = unit is None or (isinstance(unit, str) and unit.upper() in Unit.__members__)
    if not is_known or isinstance(count, bool) or not isinstance(count, int) or count < 0:
        return None
    return (Unit[unit.upper()] if unit is not None else None), count
