"""Control experiments from any process of this machine: start, pause, cancel, kill, wait, continue, delete."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from determined import _home, errors
from determined._home import Home
from determined.experiment import config as configs
from determined.experiment import runner
from determined.experiment._cleanup import delete as delete
from determined.experiment._cleanup import delete_checkpoint as delete_checkpoint
from determined.experiment._cleanup import remove_expired_logs as remove_expired_logs
from determined.experiment._continuation import continuation
from determined.experiment._create import remove_leftovers as remove_leftovers
from determined.experiment._download import download_checkpoint as download_checkpoint
from determined.experiment.executors import connect
from determined.tracking import (
    Changeset,
    Desired,
    ExperimentChange,
    ExperimentStore,
    RunProcess,
    RunState,
    TrackingReader,
    TrialChange,
    TrialRequest,
    when_available,
)

logger = logging.getLogger("determined.experiment")

_POLL_S = 0.2
_EXIT_TIMEOUT_S = 30.0
"""Seconds that a runner that has paused its experiment may take to end."""


def activate(
    experiment_id: int, at: Home | None = None, slots: int | None = None, *, force: bool = False
) -> int | None:
    """Run an experiment, from where it was if it was paused or its runner is gone.

    Returns the id of the process that runs it; None if it has ended meanwhile. `force`, here and below, takes the
    experiment from a runner of another machine or container, whose life cannot be checked from here.
    """
    if force or not is_run(experiment_id, at):
        record = TrackingReader((at or _home.home()).database).experiment(experiment_id)
        connect(record.cluster, slots).check(configs.from_map(record.config or {}))
    _ask(experiment_id, Desired.ACTIVE, at, force=force)
    return _require_runner(experiment_id, at, slots)


def pause(experiment_id: int, at: Home | None = None, *, force: bool = False) -> None:
    """Ask an experiment to pause: its trials save a checkpoint and stop until `activate`."""
    _ask(experiment_id, Desired.PAUSED, at, force=force)
    with _open(experiment_id, at) as store:
        if not _is_run(store) and store.control().state is not RunState.PAUSED:
            store.claim()
            store.commit(Changeset(experiment_change=ExperimentChange(state=RunState.PAUSED)))
            store.release()


def cancel(experiment_id: int, at: Home | None = None, *, force: bool = False) -> None:
    """Ask an experiment to end; its trials save a last checkpoint. `wait` returns when it has ended."""
    _ask(experiment_id, Desired.CANCELED, at, force=force)
    _require_runner(experiment_id, at)


def kill(experiment_id: int, at: Home | None = None, *, force: bool = False) -> None:
    """Ask an experiment to end at once, with its trials. `wait` returns when it has ended."""
    _ask(experiment_id, Desired.KILLED, at, force=force)
    _require_runner(experiment_id, at)


def kill_trial(trial_id: int, at: Home | None = None) -> None:
    """Ask the runner, or the next one, to end a trial at once; its experiment goes on."""
    experiment_id = TrackingReader((at or _home.home()).database).trial(trial_id).experiment_id
    with _open(experiment_id, at) as store:
        store.ask(requests={trial_id: TrialRequest.KILL})


def continue_experiment(
    experiment_id: int, at: Home | None = None, slots: int | None = None, overrides: Iterable[str] = ()
) -> list[int]:
    """Run an ended experiment again: its trials that did not complete go on; returns their ids.

    The only trial of a `single` search always goes on, for example after a change of its length. `overrides` change the
    config, such as "searcher.max_length.epochs=20"; what earlier trials depend on cannot change.
    """
    reopened = reopen(experiment_id, at, slots, overrides)
    _require_runner(experiment_id, at, slots)
    return reopened


def reopen(
    experiment_id: int, at: Home | None = None, slots: int | None = None, overrides: Iterable[str] = ()
) -> list[int]:
    """Do what `continue_experiment` does, but leave the experiment to the next runner."""
    with _open(experiment_id, at) as store:
        reopened = _trials_to_continue(store)
        new = continuation(experiment_id, overrides, at or _home.home(), slots)
        change = ExperimentChange(state=RunState.PAUSED, desired=Desired.ACTIVE, config=new.config)
        trials = [TrialChange(trial_id=id, state=RunState.PAUSED, restarts=0) for id in reopened]
        store.claim()
        store.commit(Changeset(trial_changes=trials, experiment_change=change))
        store.ask(max_slots=new.max_slots, priority=new.priority)
        store.release()
    return reopened


def _trials_to_continue(store: ExperimentStore) -> list[int]:
    id, state = store.experiment_id, store.control().state
    if not state.is_final:
        raise errors.ConflictException(
            f"experiment {id} has not ended ({state.value}); `det experiment activate {id}` runs it."
        )
    trials = store.trials()
    found = [trial.id for trial in trials if trial.state is not RunState.COMPLETED or len(trials) == 1]
    if not found:
        raise errors.ConflictException(f"all trials of experiment {id} have completed; there is nothing to continue.")
    return found


def wait(experiment_id: int, timeout: float | None = None, at: Home | None = None) -> RunState:
    """Wait until an experiment has ended and is cleaned up; returns its state.

    `TimeoutError` after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout

    def is_late() -> bool:
        return deadline is not None and time.monotonic() > deadline

    with _open(experiment_id, at) as store:

        def state_now() -> RunState:
            return when_available(store.control, is_late).state

        def has_runner() -> bool:
            return _runs(when_available(store.runner, is_late))

        while not (state := state_now()).is_final or has_runner():
            if not has_runner() and not state_now().is_final:
                raise errors.ConflictException(
                    f"experiment {experiment_id} is {state.value}, and nobody runs it, so it will not end; "
                    f"`det experiment activate {experiment_id}` goes on with it."
                )
            if is_late():
                raise TimeoutError(f"experiment {experiment_id} is still {state.value} after {timeout:g} seconds.")
            time.sleep(_POLL_S)
    return state


def is_run(experiment_id: int, at: Home | None = None) -> bool:
    """Return whether a living process runs an experiment."""
    with _open(experiment_id, at) as store:
        return _is_run(store)


def _open(experiment_id: int, at: Home | None) -> ExperimentStore:
    return ExperimentStore.open((at or _home.home()).database, experiment_id)


def _is_run(store: ExperimentStore) -> bool:
    return _runs(store.runner())


def _runs(process: RunProcess | None) -> bool:
    return process is not None and not process.is_gone


def _ask(experiment_id: int, desired: Desired, at: Home | None, *, force: bool) -> None:
    with _open(experiment_id, at) as store:
        store.ask(desired=desired)
        found = store.runner()
        if found is None or found.is_here or found.is_gone:
            return
        if force:
            store.claim(force=True)
            store.release()
        else:
            logger.warning(
                "Experiment %d is run by process %d on %r, and whether that process still runs cannot be checked from "
                "here. If it does, it does what was asked. If it is gone, repeat the command in two minutes, when its "
                "claim has expired, or at once with --force.",
                experiment_id,
                found.pid,
                found.host,
            )


def _require_runner(experiment_id: int, at: Home | None, slots: int | None = None) -> int | None:
    """Start a runner unless there is one, which notices requests by itself; returns its process id."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    with _open(experiment_id, at) as store:
        # A runner that has paused the experiment takes no more requests; it is about to end.
        while _is_run(store) and store.control().state is RunState.PAUSED and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        if (found := store.runner()) is not None and not found.is_gone:
            if store.control().state is RunState.PAUSED:
                raise errors.ConflictException(
                    f"experiment {experiment_id} is PAUSED, but process {found.pid} on {found.host!r} has not "
                    "released it; end that process. If it is gone, try again in two minutes, or at once with --force."
                )
            return found.pid
        if store.control().state.is_final:
            return None
    return runner.start(experiment_id, at, slots)
