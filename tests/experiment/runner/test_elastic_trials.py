"""How many slots the trials with `slots_per_trial: {min: ..., max: ...}` start with."""

from __future__ import annotations

from world import World

from determined.experiment.executors import EndReason
from determined.experiment.runner._outcome import StopReason
from determined.tracking import Desired, RunState

RANDOM = {"name": "random", "max_trials": 4}
SINGLE = {"name": "single"}


def elastic(least: int, most: int, slots: int, searcher: dict[str, object] = SINGLE) -> World:
    world = World(searcher, slots, resources={"slots_per_trial": {"min": least, "max": most}})
    assert world.settle() is None
    return world


def test_a_trial_starts_with_the_slots_that_are_free() -> None:
    assert elastic(1, 8, slots=3).held == {1: 3}
    assert elastic(1, 2, slots=3).held == {1: 2}


def test_it_waits_if_there_are_less_than_it_needs() -> None:
    world = World(SINGLE, 3, resources={"slots_per_trial": {"min": 2, "max": 8}})
    world.held = {99: 2}
    world.settle()
    assert world.live == {}
    del world.held[99]
    world.settle()
    assert world.held == {1: 3}


def test_trials_that_wait_share_the_slots_equally() -> None:
    assert elastic(1, 8, slots=4, searcher=RANDOM).held == {1: 1, 2: 1, 3: 1, 4: 1}
    assert elastic(2, 8, slots=5, searcher=RANDOM).held == {1: 3, 2: 2}
    assert elastic(1, 2, slots=16, searcher=RANDOM).held == {1: 2, 2: 2, 3: 2, 4: 2}


def test_the_last_trials_get_more() -> None:
    world = elastic(1, 8, slots=2, searcher=RANDOM)
    world.exit(1, EndReason.COMPLETED)
    world.settle()
    world.exit(2, EndReason.COMPLETED)
    world.exit(3, EndReason.COMPLETED)
    world.settle()
    assert world.held == {4: 2}


def test_it_is_not_stopped_to_get_more() -> None:
    world = elastic(1, 4, slots=2)
    world.slots = 4
    world.settle()
    assert world.held == {1: 2}
    assert world.asked == {}
    assert world.state.wanted_slots == 2


def test_it_goes_on_with_fewer_for_another_experiment() -> None:
    world = elastic(1, 4, slots=4)
    world.slots = 1
    world.settle()
    assert world.state.trials[1].stop_reason is StopReason.YIELD
    world.exit(1, EndReason.STOPPED)
    world.settle()
    assert world.held == {1: 1}
    assert world.state.trials[1].run_id == 2


def test_it_goes_on_with_what_there_is_after_a_pause() -> None:
    world = elastic(1, 4, slots=4)
    world.record.ask(Desired.PAUSED)
    world.settle()
    world.exit(1, EndReason.STOPPED)
    assert world.settle() is RunState.PAUSED
    world.record.ask(Desired.ACTIVE)
    world.slots = 2
    world.crash()
    world.settle()
    assert world.held == {1: 2}
