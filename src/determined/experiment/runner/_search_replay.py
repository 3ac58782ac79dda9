"""The search of an experiment, rebuilt from the record and fed with what happens."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from numbers import Real
from typing import Any

from determined.experiment.config import ExperimentConfig
from determined.experiment.search import Event, Operation, Rung, Search, Validated
from determined.tracking import ExperimentStore, SearchEvent, Snapshot, Validation

_MIN_EVENTS_BETWEEN_SNAPSHOTS = 200


class SearchReplay:
    """Turns events into operations; the same events always give the same ones."""

    def __init__(self, config: ExperimentConfig, store: ExperimentStore, code: pathlib.Path) -> None:
        self._metric: str = config.searcher.metric
        self._time_metric: str | None = getattr(config.searcher, "time_metric", None)
        snapshot = store.snapshot()
        parts = (config.searcher, config.hyperparameters, config.seed)
        if snapshot is None:
            self._search, self.last_event, self.last_report = Search(*parts, folder=code), 0, 0
        else:
            self._search = Search.restore(*parts, state=snapshot.state["search"], folder=code)
            self.last_event, self.last_report = snapshot.number, int(snapshot.state["report"])
        self._last_snapshot = self.last_event
        self.catch_up(store)

    def catch_up(self, store: ExperimentStore) -> None:
        """Follow the events that were stored since the last one; for those who watch a search from outside."""
        for stored in store.events(after=self.last_event):
            self._search.handle(Event.from_json(stored.payload))
            self.last_event = stored.number
            self.last_report = max(self.last_report, stored.payload.get("report", 0))

    def handle(self, event: Event, time: float, report: int | None = None) -> tuple[SearchEvent, list[Operation]]:
        """Return an event as it is stored, and what follows from it; `report` is the id of a validation."""
        operations = self._search.handle(event)
        self.last_event += 1
        self.last_report = max(self.last_report, report or 0)
        data = event.to_json()
        stored = SearchEvent(
            number=self.last_event,
            kind=str(data["type"]),
            request_id=data.get("request_id"),
            payload=data if report is None else {**data, "report": report},
            time=time,
        )
        return stored, operations

    def validated(self, request_id: str, report: Validation) -> Validated:
        """Return the event of a validation."""
        metric = _number_in(report.metrics, self._metric)
        time = None if self._time_metric is None else _number_in(report.metrics, self._time_metric)
        return Validated(request_id, math.nan if metric is None else metric, time)

    @property
    def has_ended(self) -> bool:
        """Whether the search creates no more trials, and all have ended."""
        return self._search.has_ended

    def rungs(self) -> tuple[Rung, ...]:
        """Return where the trials are in a search with rungs."""
        return self._search.rungs()

    def progress(self, fractions: Mapping[str, float]) -> float:
        """Return how much of the search is done, from 0 to 1."""
        return self._search.progress(fractions)

    def state(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return {"search": self._search.state(), "report": self.last_report}

    def due_snapshot(self) -> Snapshot | None:
        """Return the state to store if it is time to: the more events there are, the less often."""
        since = self.last_event - self._last_snapshot
        if since < max(_MIN_EVENTS_BETWEEN_SNAPSHOTS, self.last_event // 5):
            return None
        self._last_snapshot = self.last_event
        return Snapshot(number=self.last_event, state=self.state())


def _number_in(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric as a number; None if there is no such metric, NaN if it is not a number."""
    if name not in metrics:
        return None
    value = metrics[name]
    return float(value) if isinstance(value, Real) else math.nan
