"""The book of one driven experiment: its search, its trials, its runner, and what people want of it."""

from __future__ import annotations

import contextlib
import pathlib
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Self

import sqlalchemy as sa

from determined import errors

from . import (
    _assembly,
    _best,
    _claims,
    _commit,
    _database,
    _driven_reading,
    _migrations,
    _relocation,
    _runs,
    _wishes,
    _writing,
)
from ._messages import RunState
from ._process import RunProcess
from ._reading import Reader
from ._rows import Row
from ._turns import (
    KEEP,
    Changeset,
    Control,
    Desired,
    ExperimentDescription,
    Keep,
    RunRecord,
    SearchEvent,
    Snapshot,
    TrialEntry,
    TrialRequest,
    Validation,
)
from ._views import searcher_metric

_AT_ONCE = 1000


class ExperimentStore:
    """Reads and writes one driven experiment, for its runner and for those who control it. Any thread may use it.

    Made by `create` for a new experiment and by `open` for one that is on record. Every call is a transaction of its
    own. Only the runner that has claimed the experiment can `commit`.
    """

    def __init__(self, engine: sa.Engine, experiment_id: int, config: Mapping[str, object] | None) -> None:
        self.experiment_id = experiment_id
        # One connection for all: SQLite tells each what others have stored, and it must not be told of its own.
        self._engine = engine
        self._file = _relocation.OpenFile(engine.url)
        self._searched = searcher_metric(config)
        self._process: RunProcess | None = None
        self._seen: tuple[int, int] | None = None

    @classmethod
    def create(
        cls,
        url_or_path: str | pathlib.Path,
        description: ExperimentDescription,
        prepare: Callable[[int], None] = lambda _: None,
    ) -> Self:
        """Record a new experiment without trials; the database is created if there is none.

        `prepare` is called with the id before anybody can see the experiment. If it raises, nothing is on record.
        """
        with _migrations.opened(url_or_path, creating=True, has_one_connection=True) as engine:
            with engine.begin() as connection:
                id = _writing.insert_experiment(connection, _described(description))
                prepare(id)
            return cls(engine, id, description.config)

    @classmethod
    def open(cls, url_or_path: str | pathlib.Path, experiment_id: int) -> Self:
        """Return the ledger of a driven experiment that is on record."""
        with _migrations.opened(url_or_path, has_one_connection=True) as engine:
            with _database.for_reading(engine).begin() as connection:
                row = Reader(connection).experiment(experiment_id)
            return cls(engine, experiment_id, _driven(row, experiment_id, engine.url).config)

    def claim(self, process: RunProcess | None = None, *, force: bool = False) -> None:
        """Become the runner of the experiment, as this process or another one; `TrackingException` if it has one.

        A runner that is gone is replaced. One on another host cannot be asked whether it still runs: it counts as gone
        when it has not renewed its claim for two minutes. `force` takes over from it, or from any other, whose next
        `commit` is then refused.
        """
        runner = process or RunProcess.current()
        with self._writing() as connection:
            _claims.claim(connection, self.experiment_id, runner, force=force)
        self._process = runner

    def renew(self) -> None:
        """Prolong the claim, for those who cannot see this process: for them it is gone a while after the claim ends.

        `TrackingException` if another runner has taken over.
        """
        if self._process is not None:
            with self._writing() as connection:
                _claims.renew(connection, self.experiment_id, self._process)

    def release(self) -> None:
        """Let others run the experiment. Nothing happens if this ledger does not run it (any more)."""
        if self._process is not None:
            with self._writing() as connection:
                _claims.release(connection, self.experiment_id, self._process)
            self._process = None

    def commit(self, turn: Changeset) -> list[int]:
        """Store all of a turn, or nothing if it fails; returns the ids of its new trials in their order.

        `TrackingException` if this ledger has not claimed the experiment or another runner has taken over since, if
        events are not numbered from the last stored one on, or if a run is not the next of its trial.
        """
        with self._writing() as connection:
            return _commit.store(connection, self.experiment_id, self._process, turn)

    def events(self, after: int = 0) -> list[SearchEvent]:
        """Return the events of the search with numbers above `after`, in their order."""
        with self._reading() as connection:
            return _driven_reading.events(connection, self.experiment_id, after)

    def snapshot(self) -> Snapshot | None:
        """Return the latest stored state of the search, if there is one."""
        with self._reading() as connection:
            return _driven_reading.snapshot(connection, self.experiment_id)

    def validations(self, after_id: int = 0, limit: int = _AT_ONCE) -> list[Validation]:
        """Return the first validation reports of the experiment's trials with ids above `after_id`.

        Whoever passes the last id that it got sees each report once, whatever writes at the same time. Reports that a
        later run of their trial has replaced are among them.
        """
        with self._reading() as connection:
            return _driven_reading.validations(connection, self.experiment_id, after_id, limit)

    def new_validations(self, after_id: int = 0) -> Iterator[Validation]:
        """Yield all validation reports with ids above `after_id`, in their order."""
        while True:
            found = self.validations(after_id)
            yield from found
            if len(found) < _AT_ONCE:
                return
            after_id = found[-1].id

    def best(self) -> Validation | None:
        """Return the best validation by the metric that the search goes by, if there is one.

        What is not a finite number does not count, nor what a later run of its trial has replaced. It takes the same
        time however many trials there are.
        """
        if self._searched is None:
            return None
        with self._reading() as connection:
            row = _best.best_validation(connection, self.experiment_id, self._searched[1])
            return None if row is None else _driven_reading.validation(row)

    def control(self) -> Control:
        """Return what people want of the experiment."""
        with self._reading() as connection:
            return _wishes.control(connection, self.experiment_id)

    def ask(
        self,
        *,
        desired: Desired | None = None,
        max_slots: int | Keep | None = KEEP,
        priority: int | Keep | None = KEEP,
        wishes: Mapping[int, TrialRequest] | None = None,
    ) -> None:
        """Tell the runner, or the next one, what people want; `wishes` are by trial id.

        `TrackingException` if the experiment or one of the trials has ended, if an experiment that is being canceled
        or killed should go on, or if no trial fits into `max_slots`.
        """
        limits = {
            name: value for name, value in (("max_slots", max_slots), ("priority", priority)) if value is not KEEP
        }
        with self._writing() as connection:
            _wishes.ask(connection, self.experiment_id, desired, limits, wishes or {})

    def changed(self) -> bool:
        """Return whether others have stored anything since the last call; True at the first one.

        Costs next to nothing. What this ledger stored itself does not count. With PostgreSQL always True.
        `TrackingException` if the file of the database was deleted, moved or replaced.
        """
        if self._engine.dialect.name != "sqlite":
            return True
        self._file.require_in_place()
        with _database.errors_naming(self._engine.url):
            before, self._seen = self._seen, _database.data_version(self._engine)
        return before != self._seen

    def runner(self) -> RunProcess | None:
        """Return the process that has claimed the experiment; it may be gone."""
        with self._reading() as connection:
            row = Reader(connection).runners([self.experiment_id]).get(self.experiment_id)
            return None if row is None else _runs.process_of(row)

    def trials(self) -> list[TrialEntry]:
        """Return the trials in the order in which they were created, without their metrics."""
        with self._reading() as connection:
            return [_assembly.entry(row) for row in Reader(connection).trials([self.experiment_id])]

    def runs(self, trial_id: int) -> list[RunRecord]:
        """Return the runs of a trial, the first one first."""
        with self._reading() as connection:
            reader = Reader(connection)
            trial = reader.trial(trial_id)
            if trial is None or trial.experiment_id != self.experiment_id:
                raise errors.TrackingException(
                    f"there is no trial {trial_id} in experiment {self.experiment_id}; trials() tells which there are."
                )
            return [_runs.record_of(run) for run in reader.runs([trial])[trial_id]]

    def close(self) -> None:
        """Close the connection to the database; the claim stays. Twice is fine."""
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

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        self._file.require_in_place()
        with _database.errors_naming(self._engine.url), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with _database.errors_naming(self._engine.url), _database.for_reading(self._engine).begin() as connection:
            yield connection


def _described(description: ExperimentDescription) -> dict[str, object]:
    is_paused = description.desired is Desired.PAUSED
    return {
        "name": description.name,
        "config": description.config,
        "is_local": False,
        "state": (RunState.PAUSED if is_paused else RunState.ACTIVE).value,
        "progress": 0.0,
        "started": time.time(),
        "description": description.description,
        "labels": list(description.labels),
        "project": description.project,
        "workspace": description.workspace,
        "priority": description.priority,
        "max_slots": description.max_slots,
        "desired": description.desired.value,
    }


def _driven(row: Row | None, experiment_id: int, url: sa.URL) -> Row:
    if row is None:
        raise errors.NotOnRecordException(
            f"there is no experiment {experiment_id} in {_database.shown(url)!r}; `det experiment list` shows what "
            "there is."
        )
    if row.is_local:
        raise errors.TrackingException(
            f"experiment {experiment_id} is the run of a script, which nobody drives; name one that "
            "`det experiment create` made."
        )
    return row
