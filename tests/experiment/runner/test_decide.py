"""The decisions of a runner, rule by rule, without any process or database."""

from __future__ import annotations

import pytest
from world import World

from determined.experiment.executors import EndReason
from determined.experiment.runner._decide import MAX_INVALID_IN_A_ROW
from determined.experiment.runner._outcome import StopReason
from determined.experiment.runner._state import Action, Command
from determined.tracking import Changeset, CheckpointRecord, CheckpointState, Desired, RunState, TrialRequest

RANDOM = {"name": "random", "max_trials": 4}
ASHA = {
    "name": "async_halving",
    "time_metric": "batches",
    "num_rungs": 2,
    "max_trials": 4,
    "max_time": 16,
    "divisor": 4,
    "max_concurrent_trials": 2,
}


def running(searcher: dict[str, object] = RANDOM, slots: int = 2, **settings: object) -> World:
    """Return an experiment whose first trials run."""
    world = World(searcher, slots, **settings)
    assert world.settle() is None
    assert sorted(world.live) == list(range(1, slots + 1))
    return world


def test_a_search_begins_with_its_first_trials() -> None:
    world = World(RANDOM)
    world.step()
    assert [event.kind for event in world.changes.events] == ["began"]
    assert len(world.changes.new_trials) == 4
    assert world.performed == []


def test_trials_take_slots_in_their_order_and_start_only_with_them() -> None:
    world = World(RANDOM, slots=2)
    world.step()
    world.step()
    assert world.performed == [Command(Action.TAKE, 1), Command(Action.TAKE, 2)]
    world.step()
    assert world.performed == [Command(Action.START, 1), Command(Action.START, 2)]


def test_a_run_is_stored_in_the_step_that_starts_it() -> None:
    world = World(RANDOM)
    while not world.live:
        world.step()
    begun = [change.trial_id for change in world.changes.trial_changes if change.run_id == 1]
    assert begun == [id for action, id in world.performed if action is Action.START] == [1, 2]


def test_nothing_is_stored_or_done_while_nothing_happens() -> None:
    world = running()
    world.step()
    assert world.changes == Changeset()
    assert world.performed == []


def test_slots_of_a_trial_that_ended_go_to_the_next_one() -> None:
    world = running()
    world.exit(1, EndReason.COMPLETED)
    world.step()
    assert world.performed[0] == Command(Action.RELEASE, 1)
    world.settle()
    assert sorted(world.live) == [2, 3]


def test_an_experiment_ends_with_its_last_trial() -> None:
    world = running({"name": "random", "max_trials": 2})
    world.exit(1, EndReason.COMPLETED)
    assert world.settle() is None
    world.exit(2, EndReason.COMPLETED)
    assert world.step() is RunState.COMPLETED
    assert world.record.control.state is RunState.COMPLETED
    assert not world.held


def test_validations_are_taken_in_before_the_exit_of_their_run() -> None:
    world = running()
    world.validate(1, loss=0.5)
    world.exit(1, EndReason.COMPLETED)
    world.step()
    assert [event.kind for event in world.changes.events] == ["validated", "exited"]


def test_a_trial_that_the_search_stops_is_asked_to_stop_and_completes() -> None:
    world = running(ASHA)
    world.validate(1, loss=0.1, batches=4)
    world.step()
    world.validate(2, loss=0.9, batches=4)
    world.step()
    assert world.performed == [Command(Action.STOP, 2)]
    assert world.record.trials[2].state is RunState.STOPPING_COMPLETED
    world.exit(2, EndReason.STOPPED)
    world.step()
    assert world.record.trials[2].state is RunState.COMPLETED


# Failures


def test_a_failed_trial_is_restarted_from_its_checkpoint() -> None:
    world = running({"name": "single"}, slots=1)
    world.checkpoints[1] = saved = checkpoint(steps=7)
    world.exit(1, EndReason.FAILED)
    world.step()
    assert world.record.trials[1].restarts == 1
    started = []
    while not world.live:
        world.step()
        started += [change.started_from_step for change in world.changes.trial_changes if change.run_id == 2]
    assert started == [7]
    assert world.state.trials[1].checkpoint is saved


def checkpoint(steps: int) -> CheckpointRecord:
    return CheckpointRecord(
        uuid="saved",
        experiment_id=1,
        trial_id=1,
        state=CheckpointState.COMPLETED,
        steps_completed=steps,
        path="/nowhere",
        metadata={},
        resources={},
        size=0,
        time=1.0,
    )


def test_a_trial_that_fails_too_often_ends_with_an_error() -> None:
    world = running({"name": "single"}, slots=1, max_restarts=1)
    world.exit(1, EndReason.FAILED)
    world.settle()
    world.exit(1, EndReason.FAILED)
    assert world.step() is RunState.ERROR
    assert world.record.trials[1].reason == "words (after 1 restarts)"


@pytest.mark.parametrize("others_first", [True, False])
def test_a_search_that_cannot_go_on_loses_no_exit_of_the_same_step(others_first: bool) -> None:
    world = running(ASHA)
    world.validate(1, loss=0.1)  # without its time metric
    for trial_id in (2, 1) if others_first else (1, 2):
        world.exit(trial_id, EndReason.COMPLETED)
    assert world.settle() is RunState.ERROR
    assert world.states() == [RunState.COMPLETED, RunState.COMPLETED]


def test_a_search_that_cannot_go_on_stops_all_other_trials() -> None:
    world = running(ASHA)
    world.validate(1, loss=0.1)
    world.step()
    assert world.record.control.state is RunState.STOPPING_ERROR
    assert world.asked == {1: Action.STOP, 2: Action.STOP}
    world.crash()
    assert world.state.stop_reason is StopReason.ERROR
    for trial_id in (1, 2):
        world.exit(trial_id, EndReason.STOPPED)
    assert world.settle() is RunState.ERROR
    assert world.states() == [RunState.ERROR, RunState.ERROR]


def test_too_many_trials_with_invalid_hyperparameters_end_the_experiment() -> None:
    world = running()
    for _ in range(MAX_INVALID_IN_A_ROW // 2):
        for trial_id in list(world.live):
            world.exit(trial_id, EndReason.INVALID_HP)
        world.settle()
    assert world.state.outcome is RunState.ERROR
    assert set(world.states()) == {RunState.ERROR}
    assert None not in world.record.runs.values()


# What people ask for


def test_a_paused_experiment_stops_its_trials_and_is_left_when_all_have_stopped() -> None:
    world = running()
    world.record.ask(Desired.PAUSED)
    world.step()
    assert world.performed == [Command(Action.STOP, 1), Command(Action.STOP, 2)]
    world.exit(1, EndReason.STOPPED)
    assert world.settle() is None
    world.exit(2, EndReason.STOPPED)
    assert world.step() is RunState.PAUSED
    assert set(world.states()) == {RunState.PAUSED}
    assert not world.held


def test_an_experiment_that_is_activated_before_all_trials_have_stopped_goes_on() -> None:
    world = running()
    world.record.ask(Desired.PAUSED)
    world.step()
    world.exit(1, EndReason.STOPPED)
    world.step()
    world.record.ask(Desired.ACTIVE)
    world.settle()
    assert world.live == {1: 2, 2: 1}
    world.exit(2, EndReason.STOPPED)  # it had been asked to before
    world.settle()
    assert world.live == {1: 2, 2: 2}
    assert world.record.trials[2].restarts == 0


@pytest.mark.parametrize(("desired", "action"), [(Desired.CANCELED, Action.STOP), (Desired.KILLED, Action.KILL)])
def test_an_experiment_that_should_end_closes_trials_that_wait_at_once(desired: Desired, action: Action) -> None:
    world = running()
    world.record.ask(desired)
    world.step()
    assert world.asked == {1: action, 2: action}
    assert world.states()[2:] == [RunState.CANCELED] * 2
    for trial_id in (1, 2):
        world.exit(trial_id, EndReason.STOPPED)
    assert world.step() is RunState.CANCELED
    assert set(world.states()) == {RunState.CANCELED}


def test_one_trial_can_be_killed_while_it_stops() -> None:
    world = running()
    world.record.ask(trial1=TrialRequest.STOP)
    world.step()
    world.record.ask(trial1=TrialRequest.KILL)
    world.step()
    assert world.performed == [Command(Action.KILL, 1)]
    world.exit(1, EndReason.KILLED)
    world.settle()
    assert world.record.trials[1].state is RunState.CANCELED
    assert sorted(world.live) == [2, 3]


def test_a_weaker_reason_to_stop_does_not_replace_a_stronger_one() -> None:
    world = running()
    world.record.ask(trial1=TrialRequest.KILL)
    world.step()
    world.record.ask(Desired.PAUSED)
    world.step()
    assert world.performed == [Command(Action.STOP, 2)]
    assert world.state.trials[1].stop_reason is StopReason.KILL


def test_a_process_that_is_asked_to_end_pauses_the_experiment() -> None:
    world = running({"name": "single"}, slots=1)
    world.asked_to_leave = True
    world.step()
    assert world.record.control.desired is Desired.PAUSED
    world.step()
    assert world.changes == Changeset()
    world.exit(1, EndReason.STOPPED)
    assert world.step() is RunState.PAUSED


def test_slots_that_come_too_late_are_released() -> None:
    world = World(RANDOM)
    world.step()
    world.step()
    assert world.held == {1: 1, 2: 1}
    world.record.ask(Desired.PAUSED)
    assert world.step() is RunState.PAUSED
    assert not world.held


def test_the_youngest_trials_make_room_for_other_experiments() -> None:
    world = running(slots=3)
    world.slots = 1
    world.step()
    assert world.performed == [Command(Action.STOP, 2), Command(Action.STOP, 3)]
    for trial_id in (2, 3):
        world.exit(trial_id, EndReason.STOPPED)
    world.settle()
    assert sorted(world.live) == [1]
    world.slots = 3
    world.settle()
    assert world.live == {1: 1, 2: 2, 3: 2}
    assert all(trial.restarts == 0 for trial in world.record.trials.values())


# A runner that follows another one


def test_a_run_that_was_killed_with_its_runner_is_not_a_failure() -> None:
    world = running({"name": "single"}, slots=1, max_restarts=0)
    world.crash()
    world.exit(1, EndReason.KILLED)
    world.settle()
    assert world.live == {1: 2}
    assert world.record.trials[1].restarts == 0


def test_an_adopted_run_can_be_killed() -> None:
    world = running({"name": "single"}, slots=1)
    world.crash()
    world.record.ask(Desired.KILLED)
    world.step()
    assert world.performed == [Command(Action.KILL, 1)]
    world.exit(1, EndReason.KILLED)
    assert world.step() is RunState.CANCELED


def test_a_run_that_was_stored_but_never_started_is_started_again() -> None:
    world = World({"name": "single"}, slots=1)
    world.step()
    world.step()
    world.step(crash_before="performing")
    assert (world.record.open_runs(), world.live) == ({1: None}, {})
    world.settle()
    assert world.live == {1: 2}
    assert world.record.trials[1].restarts == 0
