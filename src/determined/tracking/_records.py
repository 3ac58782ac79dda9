"""Reading the tracking database. Nothing here creates or changes anything but an outdated schema."""

from __future__ import annotations

import contextlib
import enum
import functools
import pathlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NoReturn, TypeVar

import sqlalchemy as sa

from determined import errors
from determined._home import home

from . import _database, _migrations
from ._messages import CheckpointState, MetricReport, RunState
from ._reading import NoReader, Reader
from ._rows import Row
from ._views import (
    CheckpointRecord,
    ExperimentRecord,
    RunProcess,
    TrialRecord,
    find_best,
    summarize,
)

_SHORTEST_PREFIX = 4
_MOST_CANDIDATES = 5
_LARGEST_PID = 2**32 - 1

_State = TypeVar("_State", bound=enum.Enum)


class Records:
    """Reads the tracking database, by default that of the home folder. It need not exist: then there is nothing in it.

    Holds no connection between calls, so there is nothing to close and any thread may use it. What it returns is as it
    was recorded, and complete: damage to the database is a `TrackingException`.
    """

    def __init__(self, url_or_path: str | pathlib.Path | None = None) -> None:
        self._url = _database.location(url_or_path or home().database)

    def experiments(self, limit: int | None = None) -> list[ExperimentRecord]:
        """Return the experiments, newest first, at most `limit` of them."""
        with self._reader() as reader:
            return _experiments(reader, reader.experiments(limit)[::-1])

    def experiment(self, id: int) -> ExperimentRecord:
        """Return one experiment; `TrackingException` if there is none with that id."""
        with self._reader() as reader:
            return _experiments(reader, [self._experiment(reader, id)])[0]

    def trials(self, experiment_id: int) -> list[TrialRecord]:
        """Return the trials of an experiment in the order in which they were created."""
        with self._reader() as reader:
            experiment = self._experiment(reader, experiment_id)
            return _trials(reader, experiment, reader.trials([experiment_id]))

    def trial(self, id: int) -> TrialRecord:
        """Return one trial; `TrackingException` if there is none with that id."""
        with self._reader() as reader:
            trial = self._trial(reader, id)
            return _trials(reader, self._experiment(reader, trial.experiment_id), [trial])[0]

    def history(self, trial_id: int) -> list[MetricReport]:
        """Return the reports of a trial and, before them, of those that it continues, as if it had been one run.

        What an earlier run reported after the checkpoint from which the next one started is left out.
        """
        with self._reader() as reader:
            return _history(reader, self._trial(reader, trial_id))

    def sources(self) -> set[str]:
        """Return the ids of the checkpoints from which some trial was continued."""
        with self._reader() as reader:
            return {trial.source_checkpoint for trial in reader.trials() if trial.source_checkpoint is not None}

    def checkpoints_of_experiments(self, name: str) -> list[CheckpointRecord]:
        """Return the checkpoints of all experiments with a name, those of the oldest trial first; deleted ones too."""
        with self._reader() as reader:
            trials = reader.trials([row.id for row in reader.experiments() if row.name == name])
            # By trial, since one that a crash kept from the record can get there after those of later trials.
            return sorted(_checkpoints(reader, trials), key=lambda checkpoint: checkpoint.trial_id)

    def metrics(self, trial_id: int, group: str | None = None) -> list[MetricReport]:
        """Return the reports of a trial, of one group or of all, ordered by step."""
        with self._reader() as reader:
            self._trial(reader, trial_id)
            return reader.reports([trial_id], group)[trial_id]

    def checkpoints(self, experiment_id: int | None = None, trial_id: int | None = None) -> list[CheckpointRecord]:
        """Return checkpoints, all or those of an experiment or trial, oldest first; deleted ones too."""
        with self._reader() as reader:
            if experiment_id is not None:
                self._experiment(reader, experiment_id)
            trials = reader.trials(None if experiment_id is None else [experiment_id])
            return _checkpoints(reader, [trial for trial in trials if trial_id in (None, trial.id)])

    def checkpoint(self, uuid: str) -> CheckpointRecord:
        """Return the checkpoint with this id, or with the only id that begins so (4 characters or more)."""
        with self._reader() as reader:
            if (row := reader.checkpoint(uuid)) is not None:
                return _checkpoint(row, self._trial(reader, row.trial_id).experiment_id)
            return self._beginning_with(uuid, _checkpoints(reader, reader.trials()))

    def _beginning_with(self, uuid: str, checkpoints: Iterable[CheckpointRecord]) -> CheckpointRecord:
        is_long = len(uuid) >= _SHORTEST_PREFIX
        found = [one for one in checkpoints if one.uuid == uuid or (is_long and one.uuid.startswith(uuid))]
        if not found:
            self._missing(f"checkpoint {uuid!r}", "det checkpoint list")
        if len(found) > 1:
            some = ", ".join(sorted(one.uuid for one in found)[:_MOST_CANDIDATES])
            raise errors.TrackingException(
                f"several checkpoints begin with {uuid!r} ({some}); give more characters of the one you mean."
            )
        return found[0]

    def _experiment(self, reader: Reader, id: int) -> Row:
        return reader.experiment(id) or self._missing(f"experiment {id}", "det experiment list")

    def _trial(self, reader: Reader, id: int) -> Row:
        return reader.trial(id) or self._missing(f"trial {id}", "det experiment describe ID")

    def _missing(self, what: str, command: str) -> NoReturn:
        raise errors.TrackingException(
            f"there is no {what} in {_database.shown(self._url)!r}; `{command}` shows what there is."
        )

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Reader]:
        """Give what reads all of one moment; it finds nothing where there is no database."""
        path = _database.file_of(self._url)
        if path is not None and not path.exists():
            yield NoReader()
            return
        with _database.errors_naming(self._url), self._engine.connect() as connection:
            with connection.begin():
                version = _migrations.check_version(connection)
            if 0 < version < len(_migrations.MIGRATIONS):
                self._migrate()
            with connection.begin():
                # There is no version while a run is just creating it.
                yield Reader(connection) if version else NoReader()

    @functools.cached_property
    def _engine(self) -> sa.Engine:
        return _database.reading_engine(self._url)

    def _migrate(self) -> None:
        engine = _database.writing_engine(self._url)
        try:
            _migrations.migrate(engine)
        finally:
            engine.dispose()


def _experiments(reader: Reader, rows: Sequence[Row]) -> list[ExperimentRecord]:
    trials = _grouped(reader.trials([row.id for row in rows]))
    counts = reader.checkpoint_counts([trial.id for group in trials.values() for trial in group])
    return [_experiment(row, trials.get(row.id, []), counts) for row in rows]


def _grouped(trials: Iterable[Row]) -> dict[int, list[Row]]:
    by_experiment: dict[int, list[Row]] = {}
    for trial in trials:
        by_experiment.setdefault(trial.experiment_id, []).append(trial)
    return by_experiment


def _experiment(row: Row, trials: Collection[Row], checkpoint_counts: dict[int, int]) -> ExperimentRecord:
    state = _state(RunState, row)
    running = [trial for trial in trials if _state(RunState, trial).has_process]
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
        processes=tuple(_process(trial) for trial in running) if state.has_process else (),
    )


def _process(row: Row) -> RunProcess:
    if not 0 <= row.pid <= _LARGEST_PID:
        raise row.damage("pid", row.pid)
    return RunProcess(pid=row.pid, started=row.process_started, host=row.host)


def _state(kind: type[_State], row: Row) -> _State:
    try:
        return kind(row.state)
    except ValueError as error:
        raise row.damage("state", row.state) from error


def _trials(reader: Reader, experiment: Row, rows: Sequence[Row]) -> list[TrialRecord]:
    reports = reader.reports([row.id for row in rows])
    return [_trial(row, experiment, reports[row.id]) for row in rows]


def _trial(row: Row, experiment: Row, reports: Sequence[MetricReport]) -> TrialRecord:
    return TrialRecord(
        id=row.id,
        experiment_id=row.experiment_id,
        state=_state(RunState, row),
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
        best_validation=find_best(reports, experiment.config),
        summary=summarize(reports),
    )


def _history(reader: Reader, trial: Row) -> list[MetricReport]:
    reports = reader.reports([trial.id])[trial.id]
    earlier = _continued_by(reader, trial)
    if earlier is None:
        return reports
    last = {"training": trial.source_reported_steps}
    before = _history(reader, earlier)
    kept = [r for r in before if r.steps_completed <= (last.get(r.group, trial.source_steps_completed) or 0)]
    return kept + reports


def _continued_by(reader: Reader, trial: Row) -> Row | None:
    """Return the trial whose checkpoint a trial was started from, if that is on record."""
    if trial.source_checkpoint is None:
        return None
    checkpoint = reader.checkpoint(trial.source_checkpoint) or next(
        (row for row in reader.all_checkpoints() if row.uuid == trial.source_checkpoint), None
    )
    is_earlier = checkpoint is not None and checkpoint.trial_id < trial.id
    return reader.trial(checkpoint.trial_id) if checkpoint is not None and is_earlier else None


def _checkpoints(reader: Reader, trials: Collection[Row]) -> list[CheckpointRecord]:
    experiment_of = {trial.id: trial.experiment_id for trial in trials}
    return [_checkpoint(row, experiment_of[row.trial_id]) for row in reader.checkpoints(experiment_of)]


def _checkpoint(row: Row, experiment_id: int) -> CheckpointRecord:
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
        state=_state(CheckpointState, row),
        time=row.time,
    )
