"""From rows to the records that are given to others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from . import _runs
from ._damage import Damage
from ._messages import CheckpointState, MetricReport, RunState
from ._process import RunProcess
from ._reading import Reader
from ._rows import Row
from ._turns import Desired, TrialEntry, TrialRequest
from ._views import CheckpointRecord, ExperimentRecord, TrialRecord, find_best, summarize


def experiments(reader: Reader, rows: Sequence[Row]) -> list[ExperimentRecord]:
    """Return experiments with what their trials tell."""
    trials = _grouped(reader.trials([row.id for row in rows]))
    counts = reader.checkpoint_counts([trial.id for group in trials.values() for trial in group])
    runners = _runners(reader, rows)
    return [_experiment(row, trials.get(row.id, []), counts, runners.get(row.id)) for row in rows]


def _grouped(trials: Iterable[Row]) -> dict[int, list[Row]]:
    by_experiment: dict[int, list[Row]] = {}
    for trial in trials:
        by_experiment.setdefault(trial.experiment_id, []).append(trial)
    return by_experiment


def _runners(reader: Reader, rows: Iterable[Row]) -> Mapping[int, RunProcess | None]:
    driven = [row.id for row in rows if not row.is_local]
    return {id: _runs.process_of(runner) for id, runner in reader.runners(driven).items()}


def _experiment(
    row: Row, trials: Collection[Row], checkpoint_counts: Mapping[int, int], runner: RunProcess | None
) -> ExperimentRecord:
    state = _runs.state_of(RunState, row)
    return ExperimentRecord(
        id=row.id,
        name=row.name,
        config=row.config,
        state=state,
        progress=row.progress,
        started=row.started,
        ended=row.ended,
        trial_count=len(trials),
        checkpoint_count=sum(checkpoint_counts[trial.id] for trial in trials),
        processes=_processes(trials if row.is_local else (), runner) if state.has_process else (),
        is_local=row.is_local,
        description=row.description,
        labels=labels_of(row),
        project=row.project,
        workspace=row.workspace,
        notes=row.notes,
        is_archived=bool(row.archived),
        desired=None if row.desired is None else _runs.state_of(Desired, row, "desired"),
        priority=row.priority,
        max_slots=row.max_slots,
        runner=runner,
    )


def _processes(trials: Iterable[Row], runner: RunProcess | None) -> tuple[RunProcess, ...]:
    running = [trial for trial in trials if _runs.state_of(RunState, trial).has_process]
    found = [*map(_runs.process_of, running), runner]
    return tuple(process for process in found if process is not None)


def labels_of(row: Row) -> tuple[str, ...]:
    """Return the labels in a row."""
    labels = row.labels or []
    if not all(isinstance(label, str) for label in labels):
        raise row.damage("labels", labels)
    return tuple(labels)


def trials(
    reader: Reader, experiment: Row, rows: Sequence[Row], reports: Mapping[int, Sequence[MetricReport]]
) -> list[TrialRecord]:
    """Return trials of an experiment with summaries of their metrics."""
    runner = _runners(reader, [experiment]).get(experiment.id)
    return [_trial(row, experiment, reports[row.id], runner) for row in rows]


def _trial(row: Row, experiment: Row, reports: Sequence[MetricReport], runner: RunProcess | None) -> TrialRecord:
    return TrialRecord(
        id=row.id,
        experiment_id=row.experiment_id,
        state=_runs.state_of(RunState, row),
        reason=row.reason,
        status=row.status,
        progress=row.progress,
        hparams=row.hparams,
        seed=row.seed,
        entrypoint=row.entrypoint,
        torch_version=row.torch_version,
        resolute_version=row.resolute_version,
        git_commit=row.git_commit,
        process=_runs.process_of(row),
        source_checkpoint=row.source_checkpoint,
        source_steps_completed=row.source_steps_completed,
        source_reported_steps=row.source_reported_steps,
        metadata=row.metadata or {},
        started=row.started,
        ended=row.ended,
        steps_completed=max((report.steps_completed for report in reports), default=row.source_steps_completed or 0),
        best_validation=find_best(reports, experiment.config),
        summary=summarize(reports),
        request_id=row.request_id,
        run_id=row.run_id or 0,
        restarts=row.restarts or 0,
        wish=_wish(row),
        runner=runner,
    )


def entry(row: Row) -> TrialEntry:
    """Return a trial of a driven experiment, without its metrics."""
    if row.request_id is None:
        raise row.damage("request_id", None)
    return TrialEntry(
        id=row.id,
        request_id=row.request_id,
        state=_runs.state_of(RunState, row),
        reason=row.reason,
        status=row.status,
        run_id=row.run_id or 0,
        restarts=row.restarts or 0,
        process=_runs.process_of(row),
        hparams=row.hparams,
        seed=row.seed,
        progress=row.progress,
        wish=_wish(row),
        started=row.started,
        ended=row.ended,
    )


def _wish(row: Row) -> TrialRequest | None:
    return None if row.wish is None else _runs.state_of(TrialRequest, row, "wish")


def history(reader: Reader, trial: Row, reports: Sequence[MetricReport]) -> list[MetricReport]:
    """Return the reports of a trial and, before them, of those that it continues."""
    earlier = _continued_by(reader, trial)
    if earlier is None:
        return list(reports)
    start = trial.source_steps_completed, trial.source_reported_steps
    before = history(reader, earlier, reader.reports([earlier])[earlier.id])
    kept = [one for one in before if one.steps_completed <= _runs.last_step(one.group, *start)]
    return [*kept, *reports]


def _continued_by(reader: Reader, trial: Row) -> Row | None:
    """Return the trial whose checkpoint a trial was started from, if that is on record."""
    if trial.source_checkpoint is None:
        return None
    checkpoint = reader.checkpoint(trial.source_checkpoint) or next(
        (row for row in reader.all_checkpoints() if row.uuid == trial.source_checkpoint), None
    )
    if checkpoint is None or checkpoint.trial_id >= trial.id:
        return None
    return trial_of(reader, checkpoint)


def trial_of(reader: Reader, row: Row) -> Row:
    """Return the trial that a row belongs to."""
    trial = reader.trial(row.trial_id)
    if trial is None:
        raise Damage(f"the trial of {row} is gone")
    return trial


def checkpoints(reader: Reader, trials: Collection[Row]) -> list[CheckpointRecord]:
    """Return the checkpoints of trials."""
    experiment_of = {trial.id: trial.experiment_id for trial in trials}
    return [checkpoint(row, experiment_of[row.trial_id]) for row in reader.checkpoints(experiment_of)]


def checkpoint(row: Row, experiment_id: int) -> CheckpointRecord:
    """Return one checkpoint."""
    resources = row.resources
    if not all(type(size) is int for size in resources.values()):
        raise row.damage("resources", resources)
    return CheckpointRecord(
        uuid=row.uuid,
        experiment_id=experiment_id,
        trial_id=row.trial_id,
        steps_completed=row.steps_completed,
        path=row.path,
        metadata=row.metadata,
        resources=resources,
        size=row.size,
        state=_runs.state_of(CheckpointState, row),
        time=row.time,
    )
