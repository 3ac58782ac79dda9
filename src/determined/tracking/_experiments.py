"""The record of one managed experiment: its search, its trials, its runner, and what people want of it."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Self

import sqlalchemy as sa

from determined import errors

from . import _commit, _leases, _queries
from ._data.changesets import (
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
    given,
)
from ._data.messages import RunState
from ._data.process import RunProcess
from ._data.records import searcher_metric
from ._database import schema as db
from ._database.access import OpenDatabase
from ._database.connections import data_version, errors_naming, for_reading, shown, transaction
from ._database.migrations import opened

_BATCH_SIZE = 1000
# Made once, since runners ask often.
_LATER_VALIDATIONS = (
    sa.select(db.metrics)
    .where(
        db.metrics.c.experiment_id == sa.bindparam("experiment"),
        db.metrics.c.number > sa.bindparam("after", type_=sa.BigInteger),
    )
    .order_by(db.metrics.c.number)
    .limit(sa.bindparam("most", type_=sa.BigInteger))
)
_FINAL_REQUESTS = (Desired.CANCELED, Desired.KILLED)
_OF_EXPERIMENT = sa.select(
    *(db.experiments.c[name] for name in ("desired", "state", "progress", "started", "max_slots", "priority"))
).where(db.experiments.c.id == sa.bindparam("experiment"))
# Not in order: SQLite would rather look through all trials than sort a few.
_REQUESTED = sa.select(db.trials.c.id, db.trials.c.requested).where(
    db.trials.c.experiment_id == sa.bindparam("experiment"), db.trials.c.requested.is_not(None)
)


class ExperimentStore(OpenDatabase):
    """Reads and writes one managed experiment, for its runner and for those who control it. Any thread may use it.

    Made by `create` for a new experiment and by `open` for one that is on record. Every call is a transaction of its
    own. Only the runner that has claimed the experiment can `commit`.
    """

    def __init__(self, engine: sa.Engine, experiment_id: int, config: Mapping[str, object] | None) -> None:
        self.experiment_id = experiment_id
        # Its engine has one connection: SQLite reports to each what others have stored.
        super().__init__(engine)
        self._smaller_is_better = (searcher_metric(config) or (None, True))[1]
        self._process: RunProcess | None = None
        self._seen: Hashable = None

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
        with opened(url_or_path, creating=True, has_one_connection=True) as engine:
            with transaction(engine) as connection:
                insert = sa.insert(db.experiments).returning(db.experiments.c.id)
                id = connection.execute(insert, _described(description)).scalar_one()
                prepare(id)
            return cls(engine, id, description.config)

    @classmethod
    def open(cls, url_or_path: str | pathlib.Path, experiment_id: int) -> Self:
        """Return the store of a managed experiment that is on record."""
        with opened(url_or_path, has_one_connection=True) as engine:
            query = sa.select(db.experiments).where(db.experiments.c.id == experiment_id)
            with for_reading(engine).begin() as connection:
                row = connection.execute(query).one_or_none()
            return cls(engine, experiment_id, _managed(row, experiment_id, engine.url).config)

    def claim(self, process: RunProcess | None = None, *, force: bool = False) -> None:
        """Become the runner of the experiment, as this process or another one; `ConflictException` if it has one.

        A runner that is gone is replaced. One on another host cannot be asked whether it still runs: it counts as gone
        when it has not renewed its claim for two minutes. `force` takes over from it, or from any other, whose next
        `commit` is then refused.
        """
        runner = process or RunProcess.current()
        with self._writing() as connection:
            _leases.claim(connection, self.experiment_id, runner, force=force)
        self._process = runner

    def renew(self) -> None:
        """Prolong the claim, for those who cannot see this process: for them it is gone a while after the claim ends.

        `ConflictException` if another runner has taken over.
        """
        if self._process is not None:
            with self._writing() as connection:
                _leases.renew(connection, self.experiment_id, self._process)

    def release(self) -> None:
        """Let others run the experiment. Nothing happens if this store does not run it (any more)."""
        if self._process is not None:
            with self._writing() as connection:
                _leases.release(connection, self.experiment_id, self._process)
            self._process = None

    def commit(self, changes: Changeset) -> list[int]:
        """Store all changes, or nothing if one fails; return the ids of the new trials in their order.

        `ConflictException` if this store has not claimed the experiment or another runner has taken over since, if
        events are not numbered from the last stored one on, or if a run is not the next of its trial.
        """
        with self._writing() as connection:
            return _commit.store(connection, self.experiment_id, self._process, changes)

    def events(self, after: int = 0) -> list[SearchEvent]:
        """Return the events of the search with numbers above `after`, in their order."""
        with self._reading() as connection:
            columns = db.events.c
            later = columns.experiment_id == self.experiment_id, columns.number > after
            rows = connection.execute(sa.select(db.events).where(*later).order_by(columns.number))
            return [_queries.fill(SearchEvent, row) for row in rows]

    def snapshot(self) -> Snapshot | None:
        """Return the latest stored state of the search, if there is one."""
        with self._reading() as connection:
            query = sa.select(db.snapshots).where(db.snapshots.c.id == self.experiment_id)
            row = connection.execute(query).one_or_none()
            return None if row is None else _queries.fill(Snapshot, row)

    def validations(self, after_id: int = 0, limit: int = _BATCH_SIZE) -> list[Validation]:
        """Return the first validation reports of the experiment's trials with ids above `after_id`.

        Whoever passes the last id that it got sees each report once, whatever writes at the same time. Reports that a
        later run of their trial has replaced are among them.
        """
        with self._reading() as connection:
            which = {"experiment": self.experiment_id, "after": after_id, "most": limit}
            return [_queries.validation(row) for row in connection.execute(_LATER_VALIDATIONS, which)]

    def new_validations(self, after_id: int = 0) -> Iterator[Validation]:
        """Yield all validation reports with ids above `after_id`, in their order."""
        while True:
            found = self.validations(after_id)
            yield from found
            if len(found) < _BATCH_SIZE:
                return
            after_id = found[-1].id

    def best(self, trial_id: int | None = None) -> Validation | None:
        """Return the best validation of the experiment, or of one trial, by the searcher's metric, if there is one.

        What is not a finite number does not count, nor what a later run of its trial has replaced. It takes the same
        time however many trials there are.
        """
        columns = db.metrics.c
        condition = columns.experiment_id == self.experiment_id if trial_id is None else columns.trial_id == trial_id
        with self._reading() as connection:
            row = _queries.best(connection, self._smaller_is_better, condition)
            return None if row is None else _queries.validation(row)

    def control(self) -> Control:
        """Return what people want of the experiment."""
        with self._reading() as connection:
            return _control(connection, self.experiment_id)

    def ask(
        self,
        *,
        desired: Desired | None = None,
        max_slots: int | Keep | None = KEEP,
        priority: int | Keep | None = KEEP,
        requests: Mapping[int, TrialRequest] | None = None,
    ) -> None:
        """Tell the runner, or the next one, what people want; `requests` are by trial id.

        `ConflictException` if the experiment or one of the trials has ended, or if an experiment that is being canceled
        or killed should go on; `InvalidRequestException` if no trial fits into `max_slots`.
        """
        limits = given(max_slots=max_slots, priority=priority)
        with self._writing() as connection:
            _ask(connection, self.experiment_id, desired, limits, requests or {})

    def changed(self) -> bool:
        """Return whether others have stored anything since the last call; True at the first one.

        Costs next to nothing. What this store stored itself does not count with SQLite, and what is stored in any
        database of a server counts. `DatabaseException` if the file of the database was deleted, moved or replaced.
        """
        self._file.require_in_place()
        with errors_naming(self._engine.url):
            before, self._seen = self._seen, data_version(self._engine)
        return before != self._seen

    def runner(self) -> RunProcess | None:
        """Return the process that has claimed the experiment; it may be gone."""
        with self._reading() as connection:
            return _queries.runner_of(connection, self.experiment_id)

    def trials(self) -> list[TrialEntry]:
        """Return the trials in the order in which they were created, without their metrics."""
        with self._reading() as connection:
            return [_entry(row) for row in _queries.trial_rows(connection, self.experiment_id)]

    def runs(self, trial_id: int) -> list[RunRecord]:
        """Return the runs of a trial, the first one first."""
        with self._reading() as connection:
            trial = _queries.trial_row(connection, trial_id)
            if trial is None or trial.experiment_id != self.experiment_id:
                raise errors.NotOnRecordException(
                    f"there is no trial {trial_id} in experiment {self.experiment_id}; trials() lists its trials."
                )
            return _queries.runs(connection, trial_id)


def _described(description: ExperimentDescription) -> dict[str, object]:
    is_paused = description.desired is Desired.PAUSED
    return _queries.columns_of(description) | {
        "is_local": False,
        "state": RunState.PAUSED if is_paused else RunState.ACTIVE,
        "progress": 0.0,
        "started": time.time(),
    }


def _managed(row: sa.Row[Any] | None, experiment_id: int, url: sa.URL) -> sa.Row[Any]:
    if row is None:
        raise errors.NotOnRecordException(
            f"there is no experiment {experiment_id} in {shown(url)!r}; `det experiment list` shows what there is."
        )
    if row.is_local:
        raise errors.InvalidRequestException(
            f"experiment {experiment_id} is the run of a script, which no runner manages; name one that "
            "`det experiment create` made."
        )
    return row


def _entry(row: sa.Row[Any]) -> TrialEntry:
    """Return a trial without its metrics."""
    return _queries.fill(
        TrialEntry,
        row,
        run_id=row.run_id or 0,
        restarts=row.restarts or 0,
        process=_queries.process_of(row),
    )


# What people want


def _control(connection: sa.Connection, experiment_id: int) -> Control:
    """Return what is wanted of an experiment."""
    which = {"experiment": experiment_id}
    experiment = connection.execute(_OF_EXPERIMENT, which).one()
    requested = connection.execute(_REQUESTED, which)
    return _queries.fill(
        Control, experiment, requests={row.id: row.requested for row in sorted(requested, key=lambda row: int(row.id))}
    )


def _ask(
    connection: sa.Connection,
    experiment_id: int,
    desired: Desired | None,
    limits: Mapping[str, int | None],
    requests: Mapping[int, TrialRequest],
) -> None:
    """Store what is wanted of an experiment and of its trials; `limits` are columns of the experiment."""
    query = sa.select(db.experiments).where(db.experiments.c.id == experiment_id).with_for_update(key_share=True)
    experiment = connection.execute(query).one()
    if desired is not None:
        _require_possible(experiment, desired)
    _require_room_for_one(experiment, limits.get("max_slots"))
    changes = {**limits, **({} if desired is None else {"desired": desired})}
    if changes:
        connection.execute(sa.update(db.experiments).where(db.experiments.c.id == experiment_id).values(changes))
    for trial_id, request in sorted(requests.items()):
        _request(connection, experiment_id, trial_id, request)


def _require_possible(experiment: sa.Row[Any], desired: Desired) -> None:
    if experiment.state.is_final:
        raise errors.ConflictException(
            f"experiment {experiment.id} cannot become {desired.value}: it has ended ({experiment.state.value}); "
            f"`det experiment continue {experiment.id}` continues it."
        )
    before = experiment.desired
    if before in _FINAL_REQUESTS and desired not in (before, Desired.KILLED):
        raise errors.ConflictException(
            f"experiment {experiment.id} cannot become {desired.value}: it is to end as {before.value}; wait for that "
            f"by `det experiment wait {experiment.id}`."
        )


def _require_room_for_one(experiment: sa.Row[Any], max_slots: int | None) -> None:
    """Refuse a limit with which no trial could ever start."""
    needed = ((experiment.config or {}).get("resources") or {}).get("slots_per_trial") or 1
    if isinstance(needed, dict):
        needed = needed["min"]
    if max_slots is not None and max_slots < needed:
        raise errors.InvalidRequestException(
            f"max_slots={max_slots}: each trial of experiment {experiment.id} needs slots_per_trial={needed} slots; "
            f"pass at least {needed}, None for no limit, or stop all trials by `det experiment pause {experiment.id}`."
        )


def _request(connection: sa.Connection, experiment_id: int, trial_id: int, request: TrialRequest) -> None:
    query = sa.select(db.trials.c.state).where(db.trials.c.id == trial_id, db.trials.c.experiment_id == experiment_id)
    state = connection.execute(query.with_for_update(key_share=True)).scalar_one_or_none()
    if state is None:
        raise errors.NotOnRecordException(
            f"there is no trial {trial_id} in experiment {experiment_id}; "
            f"`det experiment describe {experiment_id}` shows its trials."
        )
    if state.is_final:
        raise errors.ConflictException(
            f"trial {trial_id} cannot {request.value.lower()}: it has ended ({state.value})."
        )
    connection.execute(sa.update(db.trials).where(db.trials.c.id == trial_id).values(requested=request))
