"""Storing a runner's turn, within one transaction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from determined import errors
from determined._version import VERSION

from . import _claims, _runs, _schema, _tallies, _writing
from ._messages import RunState
from ._process import RunProcess
from ._rows import EVENT, EXPERIMENT, RUN, RUNNER, SNAPSHOT, TRIAL, Row
from ._turns import Changeset, ExperimentChange, NewTrial, SearchEvent, Snapshot, TrialChange
from ._views import searcher_metric


def store(connection: sa.Connection, experiment_id: int, process: RunProcess | None, turn: Changeset) -> list[int]:
    """Store a turn of the process that runs an experiment; returns the ids of its new trials."""
    # First of all, so that of two runners one waits here.
    runner = _claims.require(connection, experiment_id, process)
    _append(connection, experiment_id, turn.events)
    ids = _create(connection, experiment_id, turn.new_trials)
    for change in turn.trial_changes:
        _change_trial(connection, experiment_id, change)
    if turn.experiment_change is not None:
        _change_experiment(connection, experiment_id, runner, turn.experiment_change)
    if turn.snapshot is not None:
        _replace_snapshot(connection, experiment_id, turn.snapshot)
    return ids


def _append(connection: sa.Connection, experiment_id: int, events: Sequence[SearchEvent]) -> None:
    if not events:
        return
    numbers = [event.number for event in events]
    before = numbers[0] - 1
    is_next = numbers == list(range(before + 1, before + 1 + len(events)))
    if not is_next or not _tallies.add_after(connection, _tallies.EVENTS, experiment_id, len(events), before):
        raise errors.TrackingException(
            f"events {numbers} of experiment {experiment_id} do not follow the last stored one, or another runner has "
            "stored some meanwhile; nothing was stored. Read events() and go on from the last one."
        )
    _writing.insert(connection, EVENT, [_stored_event(experiment_id, event) for event in events])


def _stored_event(experiment_id: int, event: SearchEvent) -> dict[str, Any]:
    return {
        "experiment_id": experiment_id,
        "number": event.number,
        "kind": event.kind,
        "request_id": event.request_id,
        "payload": event.payload,
        "time": event.time,
    }


def _create(connection: sa.Connection, experiment_id: int, trials: Sequence[NewTrial]) -> list[int]:
    now = time.time()
    return _writing.insert_trials(connection, experiment_id, [_stored_trial(trial, now) for trial in trials])


def _stored_trial(trial: NewTrial, now: float) -> dict[str, Any]:
    return {
        "request_id": trial.request_id,
        "hparams": trial.hparams,
        "seed": trial.seed,
        "entrypoint": trial.entrypoint,
        "state": trial.state.value,
        "torch_version": trial.torch_version,
        "git_commit": trial.git_commit,
        "resolute_version": VERSION,
        "started": now,
        **_runs.columns_of(None),
    }


def _change_trial(connection: sa.Connection, experiment_id: int, change: TrialChange) -> None:
    trials = _schema.trials.c
    rows = _writing.locked(connection, TRIAL, trials.id == change.trial_id, trials.experiment_id == experiment_id)
    if not rows:
        raise errors.TrackingException(
            f"trial {change.trial_id} cannot be changed: experiment {experiment_id} has no such trial; pass an id that "
            "commit() returned."
        )
    trial = rows[0]
    if changes := _of_trial(change):
        _writing.change(connection, TRIAL, trial, changes)
    if change.run_id is not None:
        _begin_run(connection, trial, change, change.run_id)
    elif (of_run := _of_run(change)) and trial.run_id:
        _change_run(connection, trial, of_run)


def _of_trial(change: TrialChange) -> dict[str, Any]:
    """Return the columns of the trial that a change is about."""
    changes: dict[str, Any] = {
        name: value for name in ("reason", "run_id", "restarts") if (value := getattr(change, name)) is not None
    }
    if change.handle is not None or change.run_id is not None:
        changes |= _runs.columns_of_handle(change.handle)
    if change.clears_wish:
        changes["wish"] = None
    return changes | _state(change.state, change.ended)


def _state(state: RunState | None, ended: float | None) -> dict[str, Any]:
    """Return the columns of a state, which also says whether there is an end."""
    if state is None:
        return {} if ended is None else {"ended": ended}
    return {"state": state.value, "ended": (ended or time.time()) if state.is_final else None}


def _begin_run(connection: sa.Connection, trial: Row, change: TrialChange, run_id: int) -> None:
    if run_id != (trial.run_id or 0) + 1:
        raise errors.TrackingException(
            f"run {run_id} of trial {trial.id} cannot begin: its last one on record is {trial.run_id or 0}; nothing "
            f"was stored. Begin run {(trial.run_id or 0) + 1}."
        )
    start = change.started_from_step
    steps = {"started_from_step": start, "reported_steps": start}
    values = {"trial_id": trial.id, "run_id": run_id, "started": time.time(), **steps}
    _writing.insert(connection, RUN, [{**values, **_runs.columns_of_handle(change.handle), **_of_run(change)}])


def _of_run(change: TrialChange) -> dict[str, Any]:
    """Return the columns of the trial's latest run that a change is about."""
    changes: dict[str, Any] = {} if change.handle is None else _runs.columns_of_handle(change.handle)
    if change.run_ended is not None:
        changes["ended"] = change.run_ended
    if change.run_reason is not None:
        changes["reason"] = change.run_reason
    return changes


def _change_run(connection: sa.Connection, trial: Row, changes: dict[str, Any]) -> None:
    runs = _schema.runs.c
    for row in _writing.locked(connection, RUN, runs.trial_id == trial.id, runs.run_id == trial.run_id):
        _writing.change(connection, RUN, row, changes)


def _change_experiment(connection: sa.Connection, id: int, runner: Row, change: ExperimentChange) -> None:
    if change.wanted_slots is not None and change.wanted_slots != runner.wanted_slots:
        _writing.change(connection, RUNNER, runner, {"wanted_slots": change.wanted_slots})
    changes = _state(change.state, change.ended)
    if change.progress is not None:
        changes["progress"] = change.progress
    if change.desired is not None:
        changes["desired"] = change.desired.value
    if change.config is not None:
        changes["config"] = change.config
    if changes:
        for row in _writing.locked(connection, EXPERIMENT, _schema.experiments.c.id == id):
            if change.config is not None:
                _require_same_metric(row, change.config)
            _writing.change(connection, EXPERIMENT, row, changes)


def _require_same_metric(experiment: Row, config: Mapping[str, Any]) -> None:
    """Raise `TrackingException` if a new config goes by another metric, by which no report was scored."""
    before, after = ((searcher_metric(one) or (None,))[0] for one in (experiment.config, config))
    if before != after:
        raise errors.TrackingException(
            f"the search of experiment {experiment.id} goes by {before!r} and cannot go on by {after!r}; leave "
            "searcher.metric as it is, or create a new experiment."
        )


def _replace_snapshot(connection: sa.Connection, experiment_id: int, snapshot: Snapshot) -> None:
    _writing.put(connection, SNAPSHOT, {"id": experiment_id, "number": snapshot.number, "state": snapshot.state})
