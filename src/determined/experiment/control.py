"""Control experiments from any process of this machine: start, pause, cancel, kill, wait, continue, delete."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from determined import errors
from determined._home import Home, home
from determined.experiment import config as configs
from determined.experiment._continuation import continuation
from determined.experiment._create import remove_leftovers as remove_leftovers
from determined.experiment._create import require_slots
from determined.experiment._deletion import delete as delete
from determined.experiment._deletion import delete_checkpoint as delete_checkpoint
from determined.experiment._download import download_checkpoint as download_checkpoint
from determined.experiment._results import remove_expired_logs as remove_expired_logs
from determined.experiment.executors import this_machine
from determined.experiment.runner import _process
from determined.tracking import (
    Changeset,
    Desired,
    ExperimentChange,
    ExperimentStore,
    RunState,
    TrackingReader,
    TrialChange,
    TrialRequest,
)

logger = logging.getLogger("determined.experiment")

_LOOKING = 0.2
_ENDING = 30.0
"""Seconds that a runner has to end, or to begin."""


def activate(
    experiment_id: int, at: Home | None = None, slots: int | None = None, *, force: bool = False
) -> int | None:
    """Let an experiment run, from where it was if it was paused or its runner is gone.

    Returns the id of the process that drives it, None if it has ended meanwhile. `force`, here and below, takes the
    experiment from a runner of another machine or container, which cannot be asked from here whether it still runs.
    """
    if force or not is_run(experiment_id, at):
        config = TrackingReader((at or home()).database).experiment(experiment_id).config
        require_slots(configs.from_map(config or {}), this_machine(slots))
    _ask(experiment_id, Desired.ACTIVE, at, force=force)
    return _have_runner(experiment_id, at, slots)


def pause(experiment_id: int, at: Home | None = None, *, force: bool = False) -> None:
    """Let all trials save and stop; `activate` goes on."""
    _ask(experiment_id, Desired.PAUSED, at, force=force)
    with ExperimentStore.open((at or home()).database, experiment_id) as ledger:
        if not _is_run(ledger) and ledger.control().state is not RunState.PAUSED:
            ledger.claim()
            ledger.commit(Changeset(experiment_change=ExperimentChange(state=RunState.PAUSED)))
            ledger.release()


def cancel(experiment_id: int, at: Home | None = None, *, force: bool = False) -> None:
    """Ask an experiment to end; its trials save a last checkpoint. `wait` returns when it has ended."""
    _ask(experiment_id, Desired.CANCELED, at, force=force)
    _have_runner(experiment_id, at)


def kill(experiment_id: int, at: Home | None = None, *, force: bool = False) -> None:
    """Ask an experiment to end at once, with its trials. `wait` returns when it has ended."""
    _ask(experiment_id, Desired.KILLED, at, force=force)
    _have_runner(experiment_id, at)


def kill_trial(trial_id: int, at: Home | None = None) -> None:
    """Ask the runner, or the next one, to end a trial at once; its experiment goes on."""
    place = at or home()
    experiment_id = TrackingReader(place.database).trial(trial_id).experiment_id
    with ExperimentStore.open(place.database, experiment_id) as ledger:
        ledger.ask(wishes={trial_id: TrialRequest.KILL})


def continue_experiment(
    experiment_id: int, at: Home | None = None, slots: int | None = None, overrides: Iterable[str] = ()
) -> list[int]:
    """Begin an ended experiment anew: its trials that did not complete go on; returns their ids.

    The only trial of a `single` search goes on in any case, as after a change of its length. `overrides` change the
    config, such as "searcher.max_length.epochs=20"; what trials that went before rest on cannot change.
    """
    reopened = reopen(experiment_id, at, slots, overrides)
    _have_runner(experiment_id, at, slots)
    return reopened


def reopen(
    experiment_id: int, at: Home | None = None, slots: int | None = None, overrides: Iterable[str] = ()
) -> list[int]:
    """Do what `continue_experiment` does, but leave the experiment to the next runner."""
    place = at or home()
    with ExperimentStore.open(place.database, experiment_id) as ledger:
        reopened = _to_continue(ledger)
        new = continuation(experiment_id, overrides, place, this_machine(slots))
        change = ExperimentChange(state=RunState.PAUSED, desired=Desired.ACTIVE, config=new.config)
        trials = [TrialChange(trial_id=id, state=RunState.PAUSED, restarts=0) for id in reopened]
        ledger.claim()
        ledger.commit(Changeset(trial_changes=trials, experiment_change=change))
        ledger.ask(max_slots=new.max_slots, priority=new.priority)
        ledger.release()
    return reopened


def _to_continue(ledger: ExperimentStore) -> list[int]:
    """Return the trials that go on when an experiment begins anew."""
    id, state = ledger.experiment_id, ledger.control().state
    if not state.is_final:
        raise errors.TrackingException(
            f"experiment {id} has not ended ({state.value}); `det experiment activate {id}` lets it run."
        )
    trials = ledger.trials()
    found = [trial.id for trial in trials if trial.state is not RunState.COMPLETED or len(trials) == 1]
    if not found:
        raise errors.TrackingException(f"all trials of experiment {id} have completed; there is nothing to continue.")
    return found


def wait(experiment_id: int, timeout: float | None = None, at: Home | None = None) -> RunState:
    """Wait until an experiment has ended and is tidied up; returns its state. `TimeoutError` after so many seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    with ExperimentStore.open((at or home()).database, experiment_id) as ledger:
        while not (state := ledger.control().state).is_final or _is_run(ledger):
            if not _is_run(ledger) and not ledger.control().state.is_final:
                raise errors.TrackingException(
                    f"experiment {experiment_id} is {state.value}, and nobody runs it, so it will not end; "
                    f"`det experiment activate {experiment_id}` goes on with it."
                )
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"experiment {experiment_id} is still {state.value} after {timeout:g} seconds.")
            time.sleep(_LOOKING)
    return state


def is_run(experiment_id: int, at: Home | None = None) -> bool:
    """Say whether a living process drives an experiment."""
    with ExperimentStore.open((at or home()).database, experiment_id) as ledger:
        return _is_run(ledger)


def _is_run(ledger: ExperimentStore) -> bool:
    runner = ledger.runner()
    return runner is not None and not runner.is_gone


def _ask(experiment_id: int, desired: Desired, at: Home | None, *, force: bool) -> None:
    with ExperimentStore.open((at or home()).database, experiment_id) as ledger:
        ledger.ask(desired=desired)
        runner = ledger.runner()
        if runner is None or runner.is_here or runner.is_gone:
            return
        if force:
            ledger.claim(force=True)
            ledger.release()
        else:
            logger.warning(
                "Experiment %d is run by process %d on %r, which cannot be asked from here whether it still runs. If "
                "it does, it does what was asked. If it is gone, repeat the command in two minutes, when its claim has "
                "expired, or at once with --force.",
                experiment_id,
                runner.pid,
                runner.host,
            )


def _have_runner(experiment_id: int, at: Home | None, slots: int | None = None) -> int | None:
    """Start a runner unless there is one, which notices by itself what it is asked for; returns its process id."""
    deadline = time.monotonic() + _ENDING
    with ExperimentStore.open((at or home()).database, experiment_id) as ledger:
        # One that has paused the experiment does not look up any more; it is about to end.
        while _is_run(ledger) and ledger.control().state is RunState.PAUSED and time.monotonic() < deadline:
            time.sleep(_LOOKING / 10)
        if (runner := ledger.runner()) is not None and not runner.is_gone:
            if ledger.control().state is RunState.PAUSED:
                raise errors.TrackingException(
                    f"experiment {experiment_id} is PAUSED, but process {runner.pid} on {runner.host!r} has not "
                    "released it; end that process. If it is gone, try again in two minutes, or at once with --force."
                )
            return runner.pid
        if ledger.control().state.is_final:
            return None
    return _process.start(experiment_id, at, slots)
