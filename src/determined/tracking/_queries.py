"""Reading within one transaction: rows as the records that are given to others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import sqlalchemy as sa

from ._data.changesets import RunRecord, Validation
from ._data.messages import CheckpointState, MetricReport, RunState
from ._data.process import RunProcess
from ._data.records import (
    BestValidation,
    CheckpointRecord,
    ExperimentRecord,
    TrialRecord,
    ranking_metric,
    searcher_metric,
    summarize,
)
from ._database import schema as db

# A run reports these at steps that follow each other, so its first one replaces all from that step on. Other groups
# may begin anywhere: the machine's own metrics do at step 0.
_IN_ORDER = ("training", "validation")
_WITH_PROCESS = [state for state in RunState if state.has_process]

_Record = TypeVar("_Record")


def fill(kind: type[_Record], row: sa.Row[Any], **given: Any) -> _Record:
    """Return a record with the columns that have the names of its fields, and what else is given."""
    columns = row._mapping
    return kind(**{name: columns[name] for name in _names(cast(Any, kind)) if name not in given}, **given)


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def columns_of(record: Any) -> dict[str, Any]:
    """Return the fields of a record by name, each of which is a column."""
    return {name: getattr(record, name) for name in _names(cast(Any, type(record)))}


def update(
    connection: sa.Connection, table: sa.Table, values: Mapping[str, Any], *conditions: sa.ColumnElement[bool]
) -> None:
    """Replace values of the rows that meet the conditions; nothing happens if there are no values."""
    if values:
        connection.execute(sa.update(table).where(*conditions).values(dict(values)))


# Processes


def process_of(row: sa.Row[Any]) -> RunProcess | None:
    """Return the process that a row names, if it names one."""
    if not row.pid:
        return None
    columns = row._mapping
    try:
        process = RunProcess.from_json({**columns, "started": columns["process_started"]})
    except (KeyError, TypeError, ValueError) as error:
        raise db.Damage(f"{row.identity!a} is not the identity of a process") from error
    return dataclasses.replace(process, alive_until=columns.get("alive_until"))


def process_columns(process: RunProcess | None) -> dict[str, Any]:
    """Return the columns that name a process, or that none is known."""
    columns = (process or RunProcess(pid=0, host="")).to_json()
    return {"process_started": columns.pop("started"), **columns}


def runner_of(connection: sa.Connection, experiment_id: int) -> RunProcess | None:
    """Return the process that has claimed an experiment, if there is one."""
    row = connection.execute(sa.select(db.runners).where(db.runners.c.id == experiment_id)).one_or_none()
    return None if row is None else process_of(row)


# Experiments

_OF_EXPERIMENT = db.trials.c.experiment_id == db.experiments.c.id
_RUNNER = [db.runners.c[name] for name in ("pid", "process_started", "host", "identity", "alive_until")]
_EXPERIMENTS = sa.select(
    db.experiments,
    *_RUNNER,
    sa.select(sa.func.count()).where(_OF_EXPERIMENT).scalar_subquery().label("trial_count"),
    sa.select(sa.func.count())
    .select_from(db.checkpoints.join(db.trials))
    .where(_OF_EXPERIMENT, db.checkpoints.c.state == CheckpointState.COMPLETED)
    .scalar_subquery()
    .label("checkpoint_count"),
).outerjoin(db.runners, db.runners.c.id == db.experiments.c.id)


def experiments(
    connection: sa.Connection, *conditions: sa.ColumnElement[bool], limit: int | None = None
) -> list[ExperimentRecord]:
    """Return experiments, the newest first."""
    query = _EXPERIMENTS.where(*conditions).order_by(db.experiments.c.id.desc()).limit(limit)
    rows = connection.execute(query).all()
    of_scripts = _processes(connection, [row.id for row in rows if row.is_local and row.state.has_process])
    return [_experiment(row, of_scripts.get(row.id, ())) for row in rows]


def _processes(connection: sa.Connection, experiment_ids: Sequence[int]) -> dict[int, tuple[RunProcess, ...]]:
    """Return the processes of trials that should be running, by experiment."""
    columns = db.trials.c
    found: dict[int, tuple[RunProcess, ...]] = {}
    query = sa.select(db.trials)
    of_experiments = columns.experiment_id.in_(experiment_ids)
    for row in connection.execute(query.where(of_experiments, columns.state.in_(_WITH_PROCESS)).order_by(columns.id)):
        if (process := process_of(row)) is not None:
            found[row.experiment_id] = (*found.get(row.experiment_id, ()), process)
    return found


def _experiment(row: sa.Row[Any], of_script: tuple[RunProcess, ...]) -> ExperimentRecord:
    runner = process_of(row)
    is_run = runner is not None and row.state.has_process
    return fill(
        ExperimentRecord,
        row,
        processes=(runner,) if is_run else of_script,
        labels=tuple(row.labels or ()),
        is_archived=bool(row.archived),
        runner=runner,
    )


# Trials


def trial_row(connection: sa.Connection, id: int) -> sa.Row[Any] | None:
    """Return the columns of one trial, if there is one of that id."""
    return connection.execute(sa.select(db.trials).where(db.trials.c.id == id)).one_or_none()


def trial_rows(connection: sa.Connection, experiment_id: int) -> Sequence[sa.Row[Any]]:
    """Return the columns of the trials of an experiment in the order in which they were created."""
    query = sa.select(db.trials).where(db.trials.c.experiment_id == experiment_id)
    return connection.execute(query.order_by(db.trials.c.id)).all()


def trials(
    connection: sa.Connection,
    experiment: ExperimentRecord,
    rows: Sequence[sa.Row[Any]],
    reports: Mapping[int, Sequence[MetricReport]],
) -> list[TrialRecord]:
    """Return trials of an experiment, one or all of them, with summaries of their metrics."""
    of_one = [db.metrics.c.trial_id == rows[0].id] if len(rows) == 1 else []
    best = best_by_trial(connection, experiment, *of_one)
    return [_trial(row, reports.get(row.id, ()), best.get(row.id), experiment.runner) for row in rows]


def _trial(
    row: sa.Row[Any], reports: Sequence[MetricReport], best: BestValidation | None, runner: RunProcess | None
) -> TrialRecord:
    return fill(
        TrialRecord,
        row,
        process=process_of(row),
        metadata=row.metadata or {},
        steps_completed=max((report.steps_completed for report in reports), default=row.source_steps_completed or 0),
        best_validation=best,
        summary=summarize(reports),
        run_id=row.run_id or 0,
        restarts=row.restarts or 0,
        runner=runner,
    )


def runs(connection: sa.Connection, trial_id: int) -> list[RunRecord]:
    """Return the runs of a trial, the first one first."""
    query = sa.select(db.runs).where(db.runs.c.trial_id == trial_id).order_by(db.runs.c.run_id)
    return [_run(row) for row in connection.execute(query)]


def _run(row: sa.Row[Any]) -> RunRecord:
    process = process_of(row)
    of_process = None if process is None else process.to_json()  # up to version 5 there is no handle beside it
    return fill(RunRecord, row, process=process, handle=of_process if row.handle is None else row.handle)


# Reports


def last_step(group: str, steps_completed: int | None, reported_steps: int | None) -> int:
    """Return the last step whose reports stay when training goes on from a checkpoint."""
    # The training metrics of its last batches may be in it unreported; then they are reported again.
    return (reported_steps if group == "training" else steps_completed) or 0


def _is_current() -> sa.ColumnElement[bool]:
    """Return the condition that no later run of its trial has replaced a report, or will."""
    report, later, first = db.metrics.c, db.runs.alias(), db.metrics.alias()
    last = sa.case((report.group == "training", later.c.reported_steps), else_=later.c.started_from_step)
    first_step = (
        sa.select(sa.func.min(first.c.steps_completed))
        .where(first.c.trial_id == report.trial_id, first.c.group == report.group, first.c.run_id == later.c.run_id)
        .correlate(db.metrics, later)
        .scalar_subquery()
    )
    replaced = sa.or_(
        report.steps_completed > last,
        sa.and_(report.group.in_(_IN_ORDER), report.steps_completed >= first_step),
    )
    of_later_run = later.c.trial_id == report.trial_id, later.c.run_id > report.run_id
    return ~sa.exists().where(*of_later_run, replaced).correlate(db.metrics)


IS_CURRENT = _is_current()
_REPORTS = sa.select(*(db.metrics.c[name] for name in ("trial_id", "group", "steps_completed", "metrics", "time")))


def reports_of(connection: sa.Connection, trial_id: int, group: str | None = None) -> list[MetricReport]:
    """Return the current reports of a trial, of one group or of all, in the order of their steps."""
    return _reports(connection, db.metrics.c.trial_id == trial_id, group).get(trial_id, [])


def reports_by_trial(
    connection: sa.Connection, experiment_id: int, group: str | None = None
) -> dict[int, list[MetricReport]]:
    """Return what `reports_of` does for every trial of an experiment that has reports, by trial id."""
    ids = sa.select(db.trials.c.id).where(db.trials.c.experiment_id == experiment_id)
    return _reports(connection, db.metrics.c.trial_id.in_(ids), group)


def _reports(
    connection: sa.Connection, condition: sa.ColumnElement[bool], group: str | None
) -> dict[int, list[MetricReport]]:
    columns = db.metrics.c
    query = _REPORTS.where(condition, IS_CURRENT).order_by(columns.steps_completed, columns.id)
    found: dict[int, list[MetricReport]] = {}
    for trial_id, name, step, metrics, time in connection.execute(
        query if group is None else query.where(columns.group == group)
    ):
        report = MetricReport(group=name, steps_completed=step, metrics=metrics, time=time)
        found.setdefault(trial_id, []).append(report)
    return found


# What is best: the current validations by their scores. They are indexed, so it does not matter how many there are.
_SCORED = sa.select(db.metrics).where(db.metrics.c.score.is_not(None), IS_CURRENT)


def best(connection: sa.Connection, smaller_is_better: bool, condition: sa.ColumnElement[bool]) -> sa.Row[Any] | None:
    """Return the best validation that meets a condition, the oldest of equals."""
    ordered = _SCORED.where(condition).order_by(_direction(smaller_is_better), db.metrics.c.id)
    return connection.execute(ordered.limit(1)).one_or_none()


def best_by_trial(
    connection: sa.Connection, experiment: ExperimentRecord, *conditions: sa.ColumnElement[bool]
) -> dict[int, BestValidation]:
    """Return the best validation of each trial of an experiment that has one."""
    searched, smaller_is_better = searcher_metric(experiment.config) or (None, True)
    columns = db.metrics.c
    order = _direction(smaller_is_better), columns.steps_completed, columns.id
    rank = sa.func.row_number().over(partition_by=columns.trial_id, order_by=order).label("rank")
    scored = _SCORED.where(columns.experiment_id == experiment.id, *conditions).add_columns(rank).subquery()
    rows = connection.execute(sa.select(scored).where(scored.c.rank == 1))
    return {
        row.trial_id: BestValidation(
            metric=ranking_metric(row.metrics, searched) or "", value=row.score, steps_completed=row.steps_completed
        )
        for row in rows
    }


def _direction(smaller_is_better: bool) -> sa.ColumnElement[float]:
    return db.metrics.c.score if smaller_is_better else db.metrics.c.score.desc()


def validation(row: sa.Row[Any]) -> Validation:
    """Return a validation of a managed experiment as it is given to others."""
    return fill(Validation, row, id=row.number)


def history(connection: sa.Connection, trial: sa.Row[Any]) -> list[MetricReport]:
    """Return the reports of a trial and, before them, of those that it continues."""
    reports = reports_of(connection, trial.id)
    earlier = _continued_by(connection, trial)
    if earlier is None:
        return reports
    start = trial.source_steps_completed, trial.source_reported_steps
    before = history(connection, earlier)
    return [*(one for one in before if one.steps_completed <= last_step(one.group, *start)), *reports]


def _continued_by(connection: sa.Connection, trial: sa.Row[Any]) -> sa.Row[Any] | None:
    """Return the trial whose checkpoint a trial was started from, if that is on record."""
    if trial.source_checkpoint is None:
        return None
    source = db.checkpoints.c.uuid == trial.source_checkpoint
    query = sa.select(db.trials).join(db.checkpoints).where(source, db.trials.c.id < trial.id)
    return connection.execute(query).one_or_none()


# Checkpoints


def checkpoints(connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> list[CheckpointRecord]:
    """Return checkpoints, the oldest first; conditions may be about their trials and experiments too."""
    query = (
        sa.select(db.checkpoints, db.trials.c.experiment_id)
        .join(db.trials, db.trials.c.id == db.checkpoints.c.trial_id)
        .join(db.experiments, db.experiments.c.id == db.trials.c.experiment_id)
    )
    rows = connection.execute(query.where(*conditions).order_by(db.checkpoints.c.id))
    return [fill(CheckpointRecord, row) for row in rows]
