"""Writing to the tracking database: one `TrialWriter` for one trial."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import sqlalchemy as sa

from determined import errors

from . import _queries
from ._changes import Changes, TrialRef
from ._data.messages import Message, RunDescription, RunState
from ._data.records import is_comparable, searcher_metric
from ._database import schema as db
from ._database.access import OpenDatabase, OpenFile
from ._database.connections import empty_log, errors_naming, for_reading, shown, transaction
from ._database.migrations import opened

_BATCH_SIZE = 1000


class TrialWriter(OpenDatabase):
    """Writes what happens in one trial. Any thread may use it, several at once too.

    Made by `start` for a new local run and by `attach` for a trial that is already recorded. In an experiment that a
    runner manages, the states of the trial and the experiment are the runner's: what a `StateChanged` says is kept with
    the run that said it, where the runner finds it (`ExperimentStore.runs`), and progress is the trial's alone.
    """

    def __init__(self, engine: sa.Engine, of: TrialRef) -> None:
        self.experiment_id = of.experiment_id
        self.trial_id = of.trial_id
        self._of = of
        super().__init__(engine)

    @classmethod
    def start(cls, url_or_path: str | pathlib.Path, run: RunDescription) -> Self:
        """Record a new experiment with one active trial; the database is created if there is none."""
        with opened(url_or_path, creating=True) as engine:
            return cls(engine, _insert_run(engine, run))

    @classmethod
    def attach(
        cls, url_or_path: str | pathlib.Path, experiment_id: int, trial_id: int, run_id: int | None = None
    ) -> Self:
        """Return the writer of a trial that is already in the database.

        `run_id` is that of the trial's run that writes, in an experiment that a runner manages: what it reports is
        superseded when a later run starts from before that. In a local experiment it has no meaning.
        """
        with opened(url_or_path) as engine:
            return cls(engine, _find(engine, experiment_id, trial_id, run_id))

    def write(self, messages: Sequence[Message]) -> None:
        """Store all messages in one transaction, or none of them if it fails."""
        if not messages:
            return
        changes = Changes(self._of)
        with errors_naming(self._engine.url):
            for message in messages:
                changes.add(message)
            with transaction(self._engine) as connection:
                changes.apply(connection)

    def follow_database(self) -> bool:
        """Go on in the database that is at the path now if the one that was opened is not; return whether it has to.

        A database is created if there is none. What is on record of the run is carried over, with its ids unless others
        have them there. `DatabaseException` in an experiment that a runner manages, whose record is not the run's
        alone.
        """
        if not self._file.has_moved:
            return False
        if self._of.is_managed:
            self._file.require_in_place()
        with errors_naming(self._engine.url):
            empty_log(self._engine)  # for those who have moved only the database itself
        with opened(self._engine.url, creating=True) as engine:
            reading = for_reading(self._engine)
            with reading.begin() as source, engine.begin() as target:
                of = _carry_over(source, target, self._of)
        self._engine.dispose()
        self._engine, self._of, self._file = engine, of, OpenFile(engine.url)
        self.experiment_id, self.trial_id = of.experiment_id, of.trial_id
        return True

    def best_validation(self, metric: str, smaller_is_better: bool) -> float | None:
        """Return the best value that any trial of the experiment has reported for a validation metric.

        None when there is none; what is not a finite number does not count, nor what a later run of its trial has
        superseded. The searcher's metric is found at once however many trials there are.
        """
        with self._reading() as connection:
            if metric == self._of.metric:
                of_experiment = db.metrics.c.experiment_id == self.experiment_id
                best = _queries.best(connection, smaller_is_better, of_experiment)
                return None if best is None else float(best.score)
            reports = _queries.reports_by_trial(connection, self.experiment_id, "validation").values()
            values: Iterator[Any] = (report.metrics.get(metric) for of_trial in reports for report in of_trial)
            best_of = min if smaller_is_better else max
            return best_of((float(value) for value in values if is_comparable(value)), default=None)


def _insert_run(engine: sa.Engine, run: RunDescription) -> TrialRef:
    begun = {"state": RunState.ACTIVE, "started": time.time()}
    experiment = {"name": run.name, "config": run.config, "is_local": True, **begun}
    trial = {name: value for name, value in _queries.columns_of(run).items() if name in db.trials.c} | begun
    with transaction(engine) as connection:
        return _insert(connection, experiment, trial)


def _find(engine: sa.Engine, experiment_id: int, trial_id: int, run_id: int | None) -> TrialRef:
    experiments, trials = db.experiments.c, db.trials.c
    columns = sa.select(experiments.is_local, experiments.config, trials.run_id)
    query = columns.join(db.trials).where(trials.id == trial_id, experiments.id == experiment_id)
    with for_reading(engine).begin() as connection:
        row = connection.execute(query).one_or_none()
    if row is None:
        raise errors.NotOnRecordException(
            f"{shown(engine.url)!r} has no trial {trial_id} in experiment {experiment_id}; "
            "`det experiment list` shows what there is."
        )
    metric, _ = searcher_metric(row.config) or (None, True)
    if row.is_local:
        return TrialRef(experiment_id=experiment_id, trial_id=trial_id, metric=metric)
    if run_id is not None and not 1 <= run_id <= (row.run_id or 0):
        raise errors.InvalidRequestException(
            f"trial {trial_id} of experiment {experiment_id} has {row.run_id or 0} runs on record, so run {run_id} "
            "cannot write to it; a runner records a run before it starts it."
        )
    return TrialRef(experiment_id=experiment_id, trial_id=trial_id, is_managed=True, run_id=run_id, metric=metric)


# A local run whose database was deleted, moved or replaced goes on in the one that is at the path now


def _insert(connection: sa.Connection, experiment: Mapping[str, Any], trial: Mapping[str, Any]) -> TrialRef:
    """Store a local experiment with its trial, under new ids where they have none."""
    experiment_id = _insert_row(connection, db.experiments, experiment)
    trial_id = _insert_row(connection, db.trials, {**trial, "experiment_id": experiment_id})
    metric, _ = searcher_metric(experiment["config"]) or (None, True)
    return TrialRef(experiment_id=experiment_id, trial_id=trial_id, metric=metric)


def _insert_row(connection: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> int:
    return int(connection.execute(sa.insert(table).returning(table.c.id), dict(values)).scalar_one())


def _carry_over(source: sa.Connection, target: sa.Connection, of: TrialRef) -> TrialRef:
    """Store in the target what it lacks of a local run, and return where that is; its ids stay the same if possible."""
    experiment, trial = _row(source, db.experiments, of.experiment_id), _row(source, db.trials, of.trial_id)
    if (there := _row(target, db.trials, of.trial_id)) and _is_same(there, trial):
        carried = of
    else:
        of_experiment = _with_free_id(target, db.experiments, experiment)
        carried = _insert(target, of_experiment, _with_free_id(target, db.trials, trial))
    _copy_reports(source, target, of, carried)
    _copy_checkpoints(source, target, of.trial_id, carried.trial_id)
    return carried


def _copy_reports(source: sa.Connection, target: sa.Connection, of: TrialRef, carried: TrialRef) -> None:
    """Copy all but those that are there already, which are the first ones."""
    columns = db.metrics.c
    count = sa.select(sa.func.count()).where(columns.trial_id == carried.trial_id)
    after = target.execute(count).scalar_one()
    query = sa.select(db.metrics).where(columns.trial_id == of.trial_id).order_by(columns.id).limit(_BATCH_SIZE)
    while rows := source.execute(query.offset(after)).all():
        target.execute(sa.insert(db.metrics), [_carried_report(row._asdict(), carried) for row in rows])
        after += len(rows)


def _carried_report(row: Mapping[str, Any], carried: TrialRef) -> dict[str, Any]:
    experiment_id = None if row["experiment_id"] is None else carried.experiment_id
    return _without_id(row) | {"trial_id": carried.trial_id, "experiment_id": experiment_id}


def _copy_checkpoints(source: sa.Connection, target: sa.Connection, trial_id: int, new_trial_id: int) -> None:
    uuid = db.checkpoints.c.uuid
    query = sa.select(db.checkpoints).where(db.checkpoints.c.trial_id == trial_id).order_by(db.checkpoints.c.id)
    for row in source.execute(query):
        if target.execute(sa.select(uuid).where(uuid == row.uuid)).one_or_none() is None:
            target.execute(sa.insert(db.checkpoints), _without_id(row._asdict()) | {"trial_id": new_trial_id})


def _row(connection: sa.Connection, table: sa.Table, id: int) -> dict[str, Any]:
    row = connection.execute(sa.select(table).where(table.c.id == id)).one_or_none()
    return {} if row is None else row._asdict()


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("experiment_id", "started", "pid", "seed"))


def _with_free_id(target: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> dict[str, Any]:
    return _without_id(row) if _row(target, table, row["id"]) else dict(row)


def _without_id(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "id"}
