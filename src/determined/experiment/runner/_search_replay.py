"""The search of an experiment, rebuilt from what is on record and fed with what happens."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from numbers import Real
from typing import Any

from determined.experiment.config import ExperimentConfig
from determined.experiment.runner._changeset import ChangesetBuilder
from determined.experiment.search import Began, Event, Exited, ExitReason, Operation, Rung, Search, Validated
from determined.tracking import ExperimentStore, Validation

_FEWEST_BETWEEN_SNAPSHOTS = 200


class SearchReplay:
    """Turns what happens into events, and events into operations; the same events always give the same ones."""

    def __init__(self, config: ExperimentConfig, ledger: ExperimentStore, code: pathlib.Path) -> None:
        self._searcher = config.searcher
        self._time_metric: str | None = getattr(config.searcher, "time_metric", None)
        snapshot = ledger.snapshot()
        parts = (config.searcher, config.hyperparameters, config.seed)
        if snapshot is None:
            self._search, self.last_event, self.last_report = Search(*parts, folder=code), 0, 0
        else:
            self._search = Search.restore(*parts, state=snapshot.state["search"], folder=code)
            self.last_event, self.last_report = snapshot.number, int(snapshot.state["report"])
        self._last_snapshot = self.last_event
        self.catch_up(ledger)

    def catch_up(self, ledger: ExperimentStore) -> None:
        """Follow the events that are on record since the last one here; for those who watch a search from outside."""
        for stored in ledger.events(after=self.last_event):
            self._search.handle(Event.from_json(stored.payload))
            self.last_event = stored.number
            self.last_report = max(self.last_report, stored.payload.get("report", 0))

    def begin(self, draft: ChangesetBuilder) -> list[Operation]:
        """Return the first operations, unless the search has begun already."""
        return self._feed(draft, Began()) if self.last_event == 0 else []

    def validated(self, draft: ChangesetBuilder, request_id: str, report: Validation) -> list[Operation]:
        """Return what follows from a validation."""
        metric = number_in(report.metrics, self._searcher.metric)
        time = None if self._time_metric is None else number_in(report.metrics, self._time_metric)
        event = Validated(request_id, math.nan if metric is None else metric, time)
        return self._feed(draft, event, request_id, report.id)

    def exited(self, draft: ChangesetBuilder, request_id: str, reason: ExitReason) -> list[Operation]:
        """Return what follows from the end of a trial."""
        return self._feed(draft, Exited(request_id, reason), request_id)

    @property
    def has_ended(self) -> bool:
        """Whether the search asks for no more trials."""
        return self._search.has_ended

    def rungs(self) -> tuple[Rung, ...]:
        """Return where the trials stand in a search with rungs."""
        return self._search.rungs()

    def progress(self, fractions: Mapping[str, float]) -> float:
        """Return how much of the search is done, from 0 to 1."""
        return self._search.progress(fractions)

    def keep(self, draft: ChangesetBuilder) -> None:
        """Add the state of the search to a draft, if it is time to: the more there is in it, the less often."""
        since = self.last_event - self._last_snapshot
        if since >= max(_FEWEST_BETWEEN_SNAPSHOTS, self.last_event // 5):
            self._last_snapshot = self.last_event
            draft.take_snapshot({"search": self._search.state(), "report": self.last_report})

    def _feed(
        self, draft: ChangesetBuilder, event: Event, request_id: str | None = None, report: int | None = None
    ) -> list[Operation]:
        operations = self._search.handle(event)
        draft.add_event(event, request_id, report)
        self.last_event = draft.last_event
        self.last_report = max(self.last_report, report or 0)
        return operations


def number_in(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric as a number; None if there is no such metric, NaN if it is no number."""
    if name not in metrics:
        return None
    value = metrics[name]
    return float(value) if isinstance(value, Real) else math.nan
