"""What messages of a run do to the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, assert_never

import sqlalchemy as sa

from . import _schema, _tallies, _writing
from ._json import encode_document
from ._messages import (
    CheckpointDeleted,
    CheckpointSaved,
    CheckpointState,
    Continued,
    Message,
    MetadataChanged,
    MetricReport,
    ProgressChanged,
    RunDescription,
    SeedChanged,
    StateChanged,
    StatusChanged,
)
from ._rows import CHECKPOINT, EXPERIMENT, RUN, TRIAL, storable_group, storable_text
from ._views import is_comparable

_VALIDATION = "validation"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialRef:
    """The trial that messages are about."""

    experiment_id: int
    trial_id: int
    is_driven: bool = False  # by a runner, which decides about states
    run_id: int | None = None  # of the run that writes, in a driven experiment
    metric: str | None = None  # that the search of a driven experiment goes by


@dataclasses.dataclass(slots=True)
class Changes:
    """What a list of messages does to each table, so that each is written once."""

    of: TrialRef
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    saved: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    deleted: list[str] = dataclasses.field(default_factory=list)
    trial: dict[str, Any] = dataclasses.field(default_factory=dict)
    experiment: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    continued: Continued | None = None

    def add(self, message: Message) -> None:
        """Add what one more message does."""
        match message:
            case MetricReport():
                self.metrics.append(self._report(message))
            case CheckpointSaved():
                self.saved.append(self._checkpoint(message))
            case CheckpointDeleted():
                self.deleted.append(message.uuid)
            case StateChanged():
                self._change_state(message)
            case ProgressChanged():
                self.trial["progress"] = self.experiment["progress"] = message.progress
            case Continued():
                self.continued = message
            case StatusChanged() | MetadataChanged() | SeedChanged():
                self.trial.update(fields(message))
            case _:
                assert_never(message)

    def _report(self, report: MetricReport) -> dict[str, Any]:
        # Spelled out, because there are far more of these than of all other rows.
        group = storable_group(report.group)
        is_looked_for = self.of.is_driven and group == _VALIDATION
        return {
            "trial_id": self.of.trial_id,
            "group": group,
            "steps_completed": int(report.steps_completed),
            "time": float(report.time) + 0.0,
            "metrics": encode_document(report.metrics),
            "run_id": self.of.run_id,
            "experiment_id": self.of.experiment_id if is_looked_for else None,
            "number": None,
            "score": self._score(report) if is_looked_for else None,
        }

    def _score(self, report: MetricReport) -> float | None:
        value: Any = report.metrics.get(self.of.metric) if self.of.metric is not None else None
        return float(value) + 0.0 if is_comparable(value) else None

    def _checkpoint(self, message: CheckpointSaved) -> dict[str, Any]:
        size = sum(message.resources.values())
        state = CheckpointState.COMPLETED.value
        return {"trial_id": self.of.trial_id, "size": size, "state": state, **fields(message)}

    def _change_state(self, message: StateChanged) -> None:
        if self.of.is_driven:
            # The runner decides what the end of a process means for the trial; it can read how that called it.
            self.run.update(outcome=message.state.value, outcome_reason=message.reason)
            return
        change = {"state": message.state.value, "ended": message.time if message.state.is_final else None}
        self.experiment.update(change)
        self.trial.update(change, reason=message.reason)

    def apply(self, connection: sa.Connection) -> None:
        """Write all of it."""
        _writing.insert_reports(connection, self.metrics)
        for values in _without_known(connection, self.saved):
            _writing.insert_checkpoint(connection, values)
        for uuid in self.deleted:
            _mark_deleted(connection, uuid)
        self._apply_start(connection)
        if self.trial:
            for row in _writing.locked(connection, TRIAL, _schema.trials.c.id == self.of.trial_id):
                _writing.change(connection, TRIAL, row, self.trial)
        if self.run and self.of.run_id is not None:
            self._apply_to_run(connection)
        if self.experiment and not self.of.is_driven:
            for row in _writing.locked(connection, EXPERIMENT, _schema.experiments.c.id == self.of.experiment_id):
                _writing.change(connection, EXPERIMENT, row, self.experiment)

    def _apply_start(self, connection: sa.Connection) -> None:
        """Add where the run started from: of the run, and of the trial if that is in another trial's checkpoint."""
        start = self.continued
        if start is None:
            return
        self.run |= {
            "source_checkpoint": start.checkpoint,
            "started_from_step": start.steps_completed,
            "reported_steps": start.reported_steps,
        }
        if self.of.run_id is None or not _is_of_trial(connection, start.checkpoint, self.of.trial_id):
            self.trial |= {
                "source_checkpoint": start.checkpoint,
                "source_steps_completed": start.steps_completed,
                "source_reported_steps": start.reported_steps,
            }

    def _apply_to_run(self, connection: sa.Connection) -> None:
        runs = _schema.runs.c
        for row in _writing.locked(connection, RUN, runs.trial_id == self.of.trial_id, runs.run_id == self.of.run_id):
            _writing.change(connection, RUN, row, self.run)


def fields(message: Message | RunDescription) -> dict[str, Any]:
    """Return the fields of a message by name."""
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}


def _mark_deleted(connection: sa.Connection, uuid: str) -> None:
    for row in _writing.locked(connection, CHECKPOINT, _schema.checkpoints.c.uuid == storable_text(uuid)):
        if row.state != CheckpointState.DELETED:
            _writing.change(connection, CHECKPOINT, row, {"state": CheckpointState.DELETED.value})
            _tallies.add(connection, _tallies.DELETED, row.trial_id, 1)


def _is_of_trial(connection: sa.Connection, uuid: str, trial_id: int) -> bool:
    checkpoints = _schema.checkpoints.c
    statement = sa.select(checkpoints.trial_id).where(checkpoints.uuid == storable_text(uuid))
    return connection.execute(statement).scalar_one_or_none() == trial_id


def _without_known(connection: sa.Connection, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out checkpoints that are on record: another process may have found one before its own run told of it."""
    uuid = _schema.checkpoints.c.uuid
    ids = [storable_text(row["uuid"]) for row in saved]
    known = set(connection.execute(sa.select(uuid).where(uuid.in_(ids))).scalars()) if ids else set()
    return [row for row in saved if storable_text(row["uuid"]) not in known]
