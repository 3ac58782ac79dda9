"""Writing to the tracking database: one `TrialWriter` for one trial."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence
from typing import Self

import sqlalchemy as sa

from determined import errors

from . import _queries, _relocation
from ._changes import Changes, TrialRef
from ._data.messages import Message, RunDescription, RunState
from ._data.records import best_value, is_comparable, searcher_metric
from ._database import schema as db
from ._database.connections import empty_log, errors_naming, for_reading, shown
from ._database.files import OpenDatabase, OpenFile
from ._database.migrations import opened


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
            with self._engine.begin() as connection:
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
                of = _relocation.carry_over(source, target, self._of)
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
            values = (report.metrics.get(metric) for of_trial in reports for report in of_trial)
            return best_value(filter(is_comparable, values), smaller_is_better)


def _insert_run(engine: sa.Engine, run: RunDescription) -> TrialRef:
    begun = {"state": RunState.ACTIVE, "started": time.time()}
    experiment = {"name": run.name, "config": run.config, "is_local": True, **begun}
    trial = {name: value for name, value in _queries.columns_of(run).items() if name in db.trials.c} | begun
    with engine.begin() as connection:
        return _relocation.insert(connection, experiment, trial)


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
