"""Writing to the tracking database: one Recorder for one trial."""

from __future__ import annotations

import dataclasses
import pathlib
import time
import types
from collections.abc import Iterable, Sequence
from typing import Any, Self, assert_never

import sqlalchemy as sa

from determined import errors

from . import _database, _schema
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
                _schema.migrate(engine)
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
                _schema.migrate(engine)
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
        for message in messages:
            changes.add(message)
        with _database.errors_naming(self._engine.url), self._engine.begin() as connection:
            changes.apply(connection, self.experiment_id)

    def best_validation(self, metric: str, smaller_is_better: bool) -> float | None:
        """Return the best value that any trial of the experiment has reported for a validation metric.

        None when there is none; what is not a finite number does not count.
        """
        statement = (
            sa.select(_schema.metrics.c.metrics)
            .join(_schema.trials, _schema.trials.c.id == _schema.metrics.c.trial_id)
            .where(_schema.trials.c.experiment_id == self.experiment_id)
            .where(_schema.metrics.c.group == "validation")
        )
        engine = _database.for_reading(self._engine)
        with _database.errors_naming(engine.url), engine.begin() as connection:
            values = (metrics.get(metric) for metrics in connection.execute(statement).scalars())
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
        experiment_id = _insert(connection, _schema.experiments, experiment)
        return experiment_id, _insert(connection, _schema.trials, trial | {"experiment_id": experiment_id})


def _insert(connection: sa.Connection, table: sa.Table, values: dict[str, Any]) -> int:
    statement = sa.insert(table).values(values).returning(table.c.id)
    return int(connection.execute(statement).scalar_one())


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
    deleted: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    trial: dict[str, Any] = dataclasses.field(default_factory=dict)
    experiment: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, message: Message) -> None:
        match message:
            case MetricReport():
                self.metrics.append({"trial_id": self.trial_id, **_fields(message)})
            case CheckpointSaved():
                self.saved.append(self._checkpoint(message))
            case CheckpointDeleted():
                self.deleted.append({"deleted_uuid": message.uuid})
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
        _execute_many(connection, sa.insert(_schema.metrics), self.metrics)
        _execute_many(connection, sa.insert(_schema.checkpoints), _without_known(connection, self.saved))
        _execute_many(connection, _MARK_DELETED, self.deleted)
        if self.trial:
            trials = _schema.trials
            connection.execute(sa.update(trials).where(trials.c.id == self.trial_id).values(self.trial))
        if self.experiment:
            experiments = _schema.experiments
            mine = sa.and_(experiments.c.id == experiment_id, experiments.c.is_local)
            connection.execute(sa.update(experiments).where(mine).values(self.experiment))


def _without_known(connection: sa.Connection, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out checkpoints that are on record: another process may have found one before its own run told of it."""
    uuid = _schema.checkpoints.c.uuid
    ids = [row["uuid"] for row in saved]
    known = set(connection.execute(sa.select(uuid).where(uuid.in_(ids))).scalars()) if ids else set()
    return [row for row in saved if row["uuid"] not in known]


_MARK_DELETED = (
    sa.update(_schema.checkpoints)
    .where(_schema.checkpoints.c.uuid == sa.bindparam("deleted_uuid"))
    .values(state=CheckpointState.DELETED.value)
)


def _fields(message: Message | RunDescription) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}


def _execute_many(connection: sa.Connection, statement: sa.Executable, rows: Iterable[dict[str, Any]]) -> None:
    parameters = list(rows)
    if parameters:
        connection.execute(statement, parameters)
