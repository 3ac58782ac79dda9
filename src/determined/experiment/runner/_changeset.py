"""What a runner will store at once."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from determined.experiment.search import Create, Event
from determined.tracking import (
    Changeset,
    Desired,
    ExperimentChange,
    NewTrial,
    RunState,
    SearchEvent,
    Snapshot,
    TrialChange,
)


class ChangesetBuilder:
    """A turn in the making: events of the search, new trials, changes."""

    def __init__(self, last_event: int, entrypoint: str) -> None:
        self.last_event = last_event
        """The number of the last event, stored or in this draft."""
        self.created: list[Create] = []
        self._entrypoint = entrypoint
        self._events: list[SearchEvent] = []
        self._changes: list[TrialChange] = []
        self._experiment = ExperimentChange()
        self._snapshot: Snapshot | None = None

    def add_event(self, event: Event, request_id: str | None, report: int | None) -> None:
        """Add an event of the search; `report` is the id of the validation that it is about."""
        self.last_event += 1
        data = event.to_json()
        payload = data if report is None else {**data, "report": report}
        self._events.append(
            SearchEvent(
                number=self.last_event,
                kind=str(data["type"]),
                request_id=request_id,
                payload=payload,
                time=time.time(),
            )
        )

    def change(self, change: TrialChange) -> None:
        """Add a change of a trial."""
        self._changes.append(change)

    def change_experiment(
        self,
        *,
        state: RunState | None = None,
        progress: float | None = None,
        wanted_slots: int | None = None,
        desired: Desired | None = None,
    ) -> None:
        """Change the experiment, over what the draft says of it already."""
        given: dict[str, Any] = {"state": state, "progress": progress, "wanted_slots": wanted_slots, "desired": desired}
        self._experiment = dataclasses.replace(
            self._experiment, **{name: value for name, value in given.items() if value is not None}
        )

    def take_snapshot(self, state: dict[str, object]) -> None:
        """Store the state of the search after the last event."""
        self._snapshot = Snapshot(number=self.last_event, state=state)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to store."""
        return not (self._events or self.created or self._changes or self._experiment != ExperimentChange())

    def turn(self) -> Changeset:
        """Return what to store."""
        return Changeset(
            events=self._events,
            snapshot=self._snapshot,
            new_trials=[
                NewTrial(request_id=one.request_id, hparams=one.hparams, seed=one.seed, entrypoint=self._entrypoint)
                for one in self.created
            ],
            trial_changes=self._changes,
            experiment_change=None if self._experiment == ExperimentChange() else self._experiment,
        )
