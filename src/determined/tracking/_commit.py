"""Storing a runner's changeset, within one transaction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from determined import errors
from determined._version import VERSION

from . import _leases
from ._data.changesets import Changeset, ExperimentChange, NewTrial, SearchEvent, Snapshot, TrialChange
from ._data.messages import RunState
from ._data.process import RunProcess
from ._data.records import searcher_metric
from ._database import schema as db
from ._queries import columns_of, process_columns, update


def store(connection: sa.Connection, experiment_id: int, process: RunProcess | None, changes: Changeset) -> list[int]:
    """Store what the process that runs an experiment has decided; return the ids of its new trials."""
    # First of all, so that of two runners one waits here.
    _leases.require_claim(connection, experiment_id, process)
    _append(connection, experiment_id, changes.events)
    ids = _create(connection, experiment_id, changes.new_trials)
    for change in changes.trial_changes:
        _change_trial(connection, experiment_id, change)
    if changes.experiment_change is not None:
        _change_experiment(connection, experiment_id, changes.experiment_change)
    if changes.snapshot is not None:
        _replace_snapshot(connection, experiment_id, changes.snapshot)
    return ids


_LAST_EVENT = sa.select(sa.func.max(db.events.c.number)).where(db.events.c.experiment_id == sa.bindparam("experiment"))


def _append(connection: sa.Connection, experiment_id: int, events: Sequence[SearchEvent]) -> None:
    if not events:
        return
    last = connection.execute(_LAST_EVENT, {"experiment": experiment_id}).scalar() or 0
    numbers = [event.number for event in events]
    if numbers != list(range(last + 1, last + 1 + len(events))):
        raise errors.ConflictException(
            f"events {numbers} of experiment {experiment_id} do not follow the last stored one, or another runner has "
            "stored some meanwhile; nothing was stored. Read events() and go on from the last one."
        )
    rows = [{"experiment_id": experiment_id, **columns_of(event)} for event in events]
    connection.execute(sa.insert(db.events), rows)


def _create(connection: sa.Connection, experiment_id: int, trials: Sequence[NewTrial]) -> list[int]:
    if not trials:
        return []
    common = {
        "experiment_id": experiment_id,
        "resolute_version": VERSION,
        "started": time.time(),
        **process_columns(None),
    }
    rows = [{**common, **columns_of(trial)} for trial in trials]
    insert = sa.insert(db.trials).returning(db.trials.c.id, sort_by_parameter_order=True)
    return list(connection.execute(insert, rows).scalars())


def _change_trial(connection: sa.Connection, experiment_id: int, change: TrialChange) -> None:
    trials = db.trials.c
    of_trial = trials.id == change.trial_id, trials.experiment_id == experiment_id
    # Not the key: those who store rows that belong to the trial lock that, too.
    query = sa.select(trials.run_id).where(*of_trial).with_for_update(key_share=True)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise errors.NotOnRecordException(
            f"trial {change.trial_id} cannot be changed: experiment {experiment_id} has no such trial; pass an id that "
            "commit() returned."
        )
    update(connection, db.trials, _of_trial(change), *of_trial)
    if change.run_id is not None:
        _begin_run(connection, change, change.run_id, last=row.run_id or 0)
    elif row.run_id:
        of_run = db.runs.c.trial_id == change.trial_id, db.runs.c.run_id == row.run_id
        update(connection, db.runs, _of_run(change), *of_run)


def _of_trial(change: TrialChange) -> dict[str, Any]:
    """Return the columns of the trial that a change is about."""
    changes = _given(reason=change.reason, run_id=change.run_id, restarts=change.restarts)
    if change.handle is not None or change.run_id is not None:
        changes |= process_columns(_process_in(change.handle))
    if change.clears_request:
        changes["requested"] = None
    return changes | _state(change.state, change.ended)


def _process_in(handle: Mapping[str, Any] | None) -> RunProcess | None:
    """Return the process that a handle names; None if there is no handle, or it is of another kind of executor."""
    try:
        return RunProcess.from_json(handle or {})
    except (KeyError, TypeError, ValueError):
        return None


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _state(state: RunState | None, ended: float | None) -> dict[str, Any]:
    """Return the columns of a state, which also says whether there is an end."""
    if state is None:
        return _given(ended=ended)
    return {"state": state, "ended": (ended or time.time()) if state.is_final else None}


def _begin_run(connection: sa.Connection, change: TrialChange, run_id: int, last: int) -> None:
    if run_id != last + 1:
        raise errors.ConflictException(
            f"run {run_id} of trial {change.trial_id} cannot begin: its last one on record is {last}; nothing "
            f"was stored. Begin run {last + 1}."
        )
    start = change.started_from_step
    steps = {"started_from_step": start, "reported_steps": start}
    values = {"trial_id": change.trial_id, "run_id": run_id, "started": time.time(), **steps}
    connection.execute(sa.insert(db.runs), {**values, **process_columns(None), **_of_run(change)})


def _of_run(change: TrialChange) -> dict[str, Any]:
    """Return the columns of the trial's latest run that a change is about."""
    process = {} if change.handle is None else process_columns(_process_in(change.handle))
    return process | _given(handle=change.handle, ended=change.run_ended, reason=change.run_reason)


def _change_experiment(connection: sa.Connection, id: int, change: ExperimentChange) -> None:
    if change.wanted_slots is not None:
        wanted = {"wanted_slots": change.wanted_slots}
        update(connection, db.runners, wanted, db.runners.c.id == id)
    values = _given(progress=change.progress, desired=change.desired, config=change.config)
    values |= _state(change.state, change.ended)
    if change.config is not None:
        _require_same_metric(connection, id, change.config)
    update(connection, db.experiments, values, db.experiments.c.id == id)


def _require_same_metric(connection: sa.Connection, id: int, config: Mapping[str, Any]) -> None:
    """Raise `ConflictException` if a new config goes by another metric, by which no report was scored."""
    stored = connection.execute(sa.select(db.experiments.c.config).where(db.experiments.c.id == id)).scalar_one()
    before, after = ((searcher_metric(one) or (None,))[0] for one in (stored, config))
    if before != after:
        raise errors.ConflictException(
            f"the search of experiment {id} goes by {before!r} and cannot go on by {after!r}; leave "
            "searcher.metric as it is, or create a new experiment."
        )


def _replace_snapshot(connection: sa.Connection, experiment_id: int, snapshot: Snapshot) -> None:
    connection.execute(sa.delete(db.snapshots).where(db.snapshots.c.id == experiment_id))
    connection.execute(
        sa.insert(db.snapshots), {"id": experiment_id, "number": snapshot.number, "state": snapshot.state}
    )
