"""Writing to the tracking database: one Recorder for one trial."""

from __future__ import annotations

import dataclasses
import pathlib
import time
import types
from collections.abc import Sequence
from typing import Any, Self, assert_never

import sqlalchemy as sa

from determined import errors

from . import _database, _migrations, _reading, _schema, _tallies, _writing
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
    RunState,
    SeedChanged,
    StateChanged,
    StatusChanged,
)
from ._rows import CHECKPOINT, EXPERIMENT, TRIAL, storable_text
from ._views import best_value, is_comparable


class Recorder:
    """Writes what happens in one trial. Any thread may use it, several at once too.

    Made by `start` for a new local run and by `attach` for a trial that is already recorded.
    """

    def __init__(self, engine: sa.Engine, experiment_id: int, trial_id: int) -> None:
        self.experiment_id = experiment_id
        self.trial_id = trial_id
        self._engine = engine

    @classmethod
    def start(cls, url_or_path: str | pathlib.Path, run: RunDescription) -> Self:
        """Record a new experiment with one active trial; the database is created if there is none."""
        url = _database.location(url_or_path)
        path = _database.file_of(url)
        if path is not None:
            _database.create_file(path)
        with _database.errors_naming(url):
            engine = _database.writing_engine(url)
            try:
                _migrations.migrate(engine)
                return cls(engine, *_insert_run(engine, run))
            except BaseException:
                engine.dispose()
                raise

    @classmethod
    def attach(cls, url_or_path: str | pathlib.Path, experiment_id: int, trial_id: int) -> Self:
        """Return the recorder of a trial that is already in the database."""
        url = _database.location(url_or_path)
        with _database.errors_naming(url):
            engine = _database.writing_engine(url)
            try:
                _migrations.migrate(engine)
                _require_trial(engine, experiment_id, trial_id)
            except BaseException:
                engine.dispose()
                raise
        return cls(engine, experiment_id, trial_id)

    def write(self, messages: Sequence[Message]) -> None:
        """Store all messages in one transaction, or none of them if it fails."""
        if not messages:
            return
        changes = _Changes(self.trial_id)
        with _database.errors_naming(self._engine.url):
            for message in messages:
                changes.add(message)
            with self._engine.begin() as connection:
                changes.apply(connection, self.experiment_id)

    def best_validation(self, metric: str, smaller_is_better: bool) -> float | None:
        """Return the best value that any trial of the experiment has reported for a validation metric.

        None when there is none; what is not a finite number does not count.
        """
        engine = _database.for_reading(self._engine)
        with _database.errors_naming(engine.url), engine.begin() as connection:
            reader = _reading.Reader(connection)
            trials = reader.trials([self.experiment_id])
            reports = reader.reports([trial.id for trial in trials], "validation").values()
            values = (report.metrics.get(metric) for of_trial in reports for report in of_trial)
            return best_value(filter(is_comparable, values), smaller_is_better)

    def close(self) -> None:
        """Close the connections to the database. Twice is fine."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()


def _insert_run(engine: sa.Engine, run: RunDescription) -> tuple[int, int]:
    now = time.time()
    begun = {"state": RunState.ACTIVE.value, "started": now}
    experiment = {"name": run.name, "config": run.config, "is_local": True, **begun}
    trial = {name: value for name, value in _fields(run).items() if name in _schema.trials.c} | begun
    with engine.begin() as connection:
        experiment_id = _writing.insert_experiment(connection, experiment)
        return experiment_id, _writing.insert_trial(connection, trial | {"experiment_id": experiment_id})


def _require_trial(engine: sa.Engine, experiment_id: int, trial_id: int) -> None:
    statement = sa.select(_schema.trials.c.experiment_id).where(_schema.trials.c.id == trial_id)
    with _database.for_reading(engine).begin() as connection:
        found = connection.execute(statement).scalar_one_or_none()
    if found != experiment_id:
        raise errors.TrackingException(
            f"{_database.shown(engine.url)!r} has no trial {trial_id} in experiment {experiment_id}; "
            "`det experiment list` shows what there is."
        )


@dataclasses.dataclass(slots=True)
class _Changes:
    """What a list of messages does to each table, so that each is written once."""

    trial_id: int
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    saved: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    deleted: list[str] = dataclasses.field(default_factory=list)
    trial: dict[str, Any] = dataclasses.field(default_factory=dict)
    experiment: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, message: Message) -> None:
        match message:
            case MetricReport():
                self.metrics.append(_writing.stored_report(self.trial_id, message))
            case CheckpointSaved():
                self.saved.append(self._checkpoint(message))
            case CheckpointDeleted():
                self.deleted.append(message.uuid)
            case StateChanged():
                self._change_state(message)
            case ProgressChanged():
                self.trial["progress"] = self.experiment["progress"] = message.progress
            case Continued():
                self.trial["source_checkpoint"] = message.checkpoint
                self.trial["source_steps_completed"] = message.steps_completed
                self.trial["source_reported_steps"] = message.reported_steps
            case StatusChanged() | MetadataChanged() | SeedChanged():
                self.trial.update(_fields(message))
            case _:
                assert_never(message)

    def _checkpoint(self, message: CheckpointSaved) -> dict[str, Any]:
        size = sum(message.resources.values())
        state = CheckpointState.COMPLETED.value
        return {"trial_id": self.trial_id, "size": size, "state": state, **_fields(message)}

    def _change_state(self, message: StateChanged) -> None:
        change = {"state": message.state.value, "ended": message.time if message.state.is_final else None}
        self.experiment.update(change)
        self.trial.update(change, reason=message.reason)

    def apply(self, connection: sa.Connection, experiment_id: int) -> None:
        _writing.insert_reports(connection, self.metrics)
        for values in _without_known(connection, self.saved):
            _writing.insert_checkpoint(connection, values)
        for uuid in self.deleted:
            _mark_deleted(connection, uuid)
        if self.trial:
            for row in _writing.locked(connection, TRIAL, _schema.trials.c.id == self.trial_id):
                _writing.change(connection, TRIAL, row, self.trial)
        if self.experiment:
            for row in _writing.locked(connection, EXPERIMENT, _schema.experiments.c.id == experiment_id):
                if row.is_local:
                    _writing.change(connection, EXPERIMENT, row, self.experiment)


def _mark_deleted(connection: sa.Connection, uuid: str) -> None:
    for row in _writing.locked(connection, CHECKPOINT, _schema.checkpoints.c.uuid == storable_text(uuid)):
        if row.state != CheckpointState.DELETED:
            _writing.change(connection, CHECKPOINT, row, {"state": CheckpointState.DELETED.value})
            _tallies.add(connection, _tallies.DELETED, row.trial_id, 1)


def _without_known(connection: sa.Connection, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out checkpoints that are on record: another process may have found one before its own run told of it."""
    uuid = _schema.checkpoints.c.uuid
    ids = [storable_text(row["uuid"]) for row in saved]
    known = set(connection.execute(sa.select(uuid).where(uuid.in_(ids))).scalars()) if ids else set()
    return [row for row in saved if storable_text(row["uuid"]) not in known]


def _fields(message: Message | RunDescription) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
