"""Reading the tracking database. Nothing here creates or changes anything but an outdated schema."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, NoReturn

import sqlalchemy as sa

from determined import errors
from determined._home import home

from . import _database, _schema
from ._messages import CheckpointState, MetricReport, RunState
from ._views import (
    CheckpointRecord,
    ExperimentRecord,
    RunProcess,
    TrialRecord,
    find_best,
    summarize,
)

_SHORTEST_PREFIX = 4

_experiments = _schema.experiments
_trials = _schema.trials
_metrics = _schema.metrics
_checkpoints = _schema.checkpoints


class Records:
    """Reads the tracking database, by default that of the home folder. It need not exist: then there is nothing in it.

    Holds no connection between calls, so there is nothing to close and any thread may use it.
    """

    def __init__(self, url_or_path: str | pathlib.Path | None = None) -> None:
        self._url = _database.location(url_or_path or home().database)

    def experiments(self, limit: int | None = None) -> list[ExperimentRecord]:
        """Return the experiments, newest first, at most `limit` of them."""
        return self._experiments(_select_experiments().order_by(_experiments.c.id.desc()).limit(limit))

    def experiment(self, id: int) -> ExperimentRecord:
        """Return one experiment; `TrackingException` if there is none with that id."""
        found = self._experiments(_select_experiments().where(_experiments.c.id == id))
        return found[0] if found else self._missing(f"experiment {id}", "det experiment list")

    def trials(self, experiment_id: int) -> list[TrialRecord]:
        """Return the trials of an experiment in the order in which they were created."""
        self.experiment(experiment_id)
        return self._trials(_trials.c.experiment_id == experiment_id)

    def trial(self, id: int) -> TrialRecord:
        """Return one trial; `TrackingException` if there is none with that id."""
        found = self._trials(_trials.c.id == id)
        return found[0] if found else self._missing(f"trial {id}", "det experiment describe ID")

    def history(self, trial_id: int) -> list[MetricReport]:
        """Return the reports of a trial and, before them, of those that it continues, as if it had been one run.

        What an earlier run reported after the checkpoint from which the next one started is left out.
        """
        trial = self.trial(trial_id)
        source = sa.select(_checkpoints.c.trial_id).where(_checkpoints.c.uuid == trial.source_checkpoint)
        earlier = [row.trial_id for row in self._rows(source) if row.trial_id < trial_id]
        before = self.history(earlier[0]) if earlier else []
        last = {"training": trial.source_reported_steps}
        kept = [r for r in before if r.steps_completed <= (last.get(r.group, trial.source_steps_completed) or 0)]
        return kept + self.metrics(trial_id)

    def sources(self) -> set[str]:
        """Return the ids of the checkpoints from which some trial was continued."""
        rows = self._rows(sa.select(_trials.c.source_checkpoint).where(_trials.c.source_checkpoint.is_not(None)))
        return {row.source_checkpoint for row in rows}

    def checkpoints_of_experiments(self, name: str) -> list[CheckpointRecord]:
        """Return the checkpoints of all experiments with a name, those of the oldest trial first; deleted ones too."""
        so_named = sa.select(_experiments.c.id).where(_experiments.c.name == name)
        statement = _select_checkpoints().where(_trials.c.experiment_id.in_(so_named))
        # By trial, since one that a crash kept from the record can get there after those of later trials.
        rows = self._rows(statement.order_by(_checkpoints.c.trial_id, _checkpoints.c.id))
        return [_checkpoint(row) for row in rows]

    def metrics(self, trial_id: int, group: str | None = None) -> list[MetricReport]:
        """Return the reports of a trial, of one group or of all, ordered by step."""
        rows = self._rows(sa.select(_trials.c.id).where(_trials.c.id == trial_id))
        if not rows:
            self._missing(f"trial {trial_id}", "det experiment describe ID")
        reports = self._reports(_metrics.c.trial_id == trial_id)
        return [report for report in reports.get(trial_id, []) if group in (None, report.group)]

    def checkpoints(self, experiment_id: int | None = None, trial_id: int | None = None) -> list[CheckpointRecord]:
        """Return checkpoints, all or those of an experiment or trial, oldest first; deleted ones too."""
        statement = _select_checkpoints().order_by(_checkpoints.c.id)
        if experiment_id is not None:
            self.experiment(experiment_id)
            statement = statement.where(_trials.c.experiment_id == experiment_id)
        if trial_id is not None:
            statement = statement.where(_checkpoints.c.trial_id == trial_id)
        return [_checkpoint(row) for row in self._rows(statement)]

    def checkpoint(self, uuid: str) -> CheckpointRecord:
        """Return the checkpoint with this id, or with the only id that begins so (4 characters or more)."""
        rows = self._rows(_select_checkpoints().where(_checkpoints.c.uuid == uuid))
        if not rows and len(uuid) >= _SHORTEST_PREFIX:
            begins_so = _checkpoints.c.uuid.startswith(uuid, autoescape=True)
            rows = self._rows(_select_checkpoints().where(begins_so).order_by(_checkpoints.c.uuid).limit(5))
        if not rows:
            self._missing(f"checkpoint {uuid!r}", "det checkpoint list")
        if len(rows) > 1:
            raise errors.TrackingException(
                f"several checkpoints begin with {uuid!r} ({', '.join(row.uuid for row in rows)}); "
                "give more characters of the one you mean."
            )
        return _checkpoint(rows[0])

    def _experiments(self, statement: sa.Select[Any]) -> list[ExperimentRecord]:
        rows = self._rows(statement)
        running = [row.id for row in rows if RunState(row.state).has_process]
        processes: dict[int, list[RunProcess]] = {}
        for trial in self._rows(sa.select(_trials).where(_trials.c.experiment_id.in_(running))):
            if RunState(trial.state).has_process:
                processes.setdefault(trial.experiment_id, []).append(_process(trial))
        return [_experiment(row, processes.get(row.id, [])) for row in rows]

    def _trials(self, condition: sa.ColumnElement[bool]) -> list[TrialRecord]:
        joined = sa.select(_trials, _experiments.c.config).join(_experiments)
        rows = self._rows(joined.where(condition).order_by(_trials.c.id))
        reports = self._reports(_metrics.c.trial_id.in_(sa.select(_trials.c.id).where(condition)))
        return [_trial(row, reports.get(row.id, [])) for row in rows]

    def _reports(self, condition: sa.ColumnElement[bool]) -> dict[int, list[MetricReport]]:
        ordered = sa.select(_metrics).where(condition).order_by(_metrics.c.steps_completed, _metrics.c.id)
        by_trial: dict[int, list[MetricReport]] = {}
        for row in self._rows(ordered):
            by_trial.setdefault(row.trial_id, []).append(_report(row))
        return by_trial

    def _rows(self, statement: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        path = _database.file_of(self._url)
        if path is not None and not path.exists():
            return []
        with _database.errors_naming(self._url):
            engine = _database.reading_engine(self._url)
            try:
                return self._current_rows(engine, statement)
            finally:
                engine.dispose()

    def _current_rows(self, engine: sa.Engine, statement: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        with engine.begin() as connection:
            version = _schema.check_version(connection)
            if version == len(_schema.MIGRATIONS):
                return connection.execute(statement).all()
        if version == 0:  # a run is just creating it
            return []
        self._migrate()
        return self._current_rows(engine, statement)

    def _migrate(self) -> None:
        engine = _database.writing_engine(self._url)
        try:
            _schema.migrate(engine)
        finally:
            engine.dispose()

    def _missing(self, what: str, command: str) -> NoReturn:
        raise errors.TrackingException(
            f"there is no {what} in {_database.shown(self._url)!r}; `{command}` shows what there is."
        )


def _select_experiments() -> sa.Select[Any]:
    of_experiment = _trials.c.experiment_id == _experiments.c.id
    trials = sa.select(sa.func.count()).select_from(_trials).where(of_experiment)
    checkpoints = sa.select(sa.func.count()).select_from(_checkpoints.join(_trials)).where(of_experiment)
    return sa.select(
        _experiments,
        trials.scalar_subquery().label("trial_count"),
        checkpoints.where(_checkpoints.c.state == CheckpointState.COMPLETED.value)
        .scalar_subquery()
        .label("checkpoint_count"),
    )


def _select_checkpoints() -> sa.Select[Any]:
    return sa.select(_checkpoints, _trials.c.experiment_id).join(_trials)


def _experiment(row: sa.Row[Any], processes: Sequence[RunProcess]) -> ExperimentRecord:
    return ExperimentRecord(
        id=row.id,
        name=row.name,
        config=row.config,
        state=RunState(row.state),
        progress=row.progress,
        started=row.started,
        ended=row.ended,
        trial_count=row.trial_count,
        checkpoint_count=row.checkpoint_count,
        processes=tuple(processes),
    )


def _process(row: sa.Row[Any]) -> RunProcess:
    return RunProcess(pid=row.pid, started=row.process_started, host=row.host)


def _trial(row: sa.Row[Any], reports: Sequence[MetricReport]) -> TrialRecord:
    return TrialRecord(
        id=row.id,
        experiment_id=row.experiment_id,
        state=RunState(row.state),
        reason=row.reason,
        status=row.status,
        progress=row.progress,
        hparams=row.hparams,
        seed=row.seed,
        entrypoint=row.entrypoint,
        torch_version=row.torch_version,
        resolute_version=row.resolute_version,
        git_commit=row.git_commit,
        process=_process(row),
        source_checkpoint=row.source_checkpoint,
        source_steps_completed=row.source_steps_completed,
        source_reported_steps=row.source_reported_steps,
        metadata=row.metadata or {},
        started=row.started,
        ended=row.ended,
        steps_completed=max((report.steps_completed for report in reports), default=row.source_steps_completed or 0),
        best_validation=find_best(reports, row.config),
        summary=summarize(reports),
    )


def _report(row: sa.Row[Any]) -> MetricReport:
    return MetricReport(group=row.group, steps_completed=row.steps_completed, metrics=row.metrics, time=row.time)


def _checkpoint(row: sa.Row[Any]) -> CheckpointRecord:
    return CheckpointRecord(
        uuid=row.uuid,
        experiment_id=row.experiment_id,
        trial_id=row.trial_id,
        steps_completed=row.steps_completed,
        path=row.path,
        metadata=row.metadata,
        resources=row.resources,
        size=row.size,
        state=CheckpointState(row.state),
        time=row.time,
    )
