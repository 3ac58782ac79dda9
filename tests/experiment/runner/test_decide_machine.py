"""Any order of exits, validations, requests and crashes: what a runner promises holds."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from world import World

from determined.experiment.executors import EndReason
from determined.experiment.runner._state import Action, RunnerState
from determined.tracking import Desired, RunState, TrialRequest

SEARCHERS: list[dict[str, Any]] = [
    {"name": "single"},
    {"name": "random", "max_trials": 5, "max_concurrent_trials": 3},
    {
        "name": "async_halving",
        "time_metric": "batches",
        "num_rungs": 3,
        "max_trials": 6,
        "max_time": 16,
        "divisor": 2,
        "max_concurrent_trials": 4,
    },
]
ENOUGH = 60
"""Steps in which everything that was asked for must be over."""


def comparable(state: RunnerState) -> Any:
    """Return what the next runner must know as this one does."""
    trials = [
        (one.id, one.run_id, one.restarts, one.is_running, one.stop_reason is not None and one.stop_reason.is_for_good)
        for one in state.trials.values()
    ]
    return trials, state.final_states, state.search.last_event, state.search.state()["search"]


class Runner(RuleBasedStateMachine):
    """A runner in a world in which anything may happen at any time. `World` checks each step by itself."""

    @initialize(searcher=st.sampled_from(SEARCHERS), slots=st.integers(1, 3), max_restarts=st.integers(0, 1))
    def begin(self, searcher: dict[str, Any], slots: int, max_restarts: int) -> None:
        self.world = World(searcher, slots, max_restarts=max_restarts)

    @property
    def is_over(self) -> bool:
        outcome = self.world.state.outcome
        return outcome is not None and outcome.is_final

    @property
    def is_paused(self) -> bool:
        return self.world.state.outcome is RunState.PAUSED

    # What happens

    @precondition(lambda self: self.world.state.outcome is None)
    @rule()
    def step(self) -> None:
        self.world.step()

    @precondition(lambda self: self.world.state.outcome is None)
    @rule(where=st.sampled_from(["storing", "performing"]))
    def crash_within_a_step(self, where: str) -> None:
        self.world.step(crash_before=where)

    @precondition(lambda self: not self.is_over)
    @rule()
    def crash(self) -> None:
        self.world.crash()

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def exit(self, data: st.DataObject) -> None:
        reasons = [EndReason.COMPLETED, EndReason.FAILED, EndReason.INVALID_HP, EndReason.STOPPED, EndReason.KILLED]
        trial_id = data.draw(st.sampled_from(sorted(self.world.live)))
        self.world.exit(trial_id, data.draw(st.sampled_from(reasons)), runner_gone=data.draw(st.booleans()))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), loss=st.floats(0, 1), batches=st.integers(1, 16))
    def validate(self, data: st.DataObject, loss: float, batches: int) -> None:
        trial_id = data.draw(st.sampled_from(sorted(self.world.live)))
        self.world.validate(trial_id, loss, batches=batches)

    @precondition(
        lambda self: not self.is_over and self.world.record.control.desired in (Desired.ACTIVE, Desired.PAUSED)
    )
    @rule(desired=st.sampled_from([Desired.ACTIVE, Desired.PAUSED, Desired.PAUSED, Desired.CANCELED]))
    def ask(self, desired: Desired) -> None:
        self.world.record.ask(desired)
        if self.is_paused and desired is not Desired.PAUSED:
            self.world.crash()  # the paused runner has ended: this begins another one

    @precondition(lambda self: self.world.state.trials)
    @rule(data=st.data(), request=st.sampled_from(list(TrialRequest)))
    def ask_for_a_trial(self, data: st.DataObject, request: TrialRequest) -> None:
        trial_id = data.draw(st.sampled_from(list(self.world.state.trials)))
        self.world.record.ask(**{f"trial{trial_id}": request})

    @rule(slots=st.integers(1, 3))
    def share(self, slots: int) -> None:
        """Let other experiments take or leave slots."""
        self.world.slots = slots

    # What must hold

    @invariant()
    def a_new_runner_would_know_the_same(self) -> None:
        if not self.world.state.created:  # their ids come with the next step
            assert comparable(self.world.restored()[0]) == comparable(self.world.state)

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.is_over:
            if not self.is_paused:
                self._runs_end_as_asked()
            self._must_end_when_killed()

    def _runs_end_as_asked(self) -> None:
        """Whatever was asked for, the runner is done once all runs have ended as they were asked to."""
        for _ in range(ENOUGH):
            if self.world.step() is not None:
                return
            for trial_id in list(self.world.live):
                asked = self.world.asked.get(trial_id)
                reason = EndReason.COMPLETED if asked is None else EndReason.STOPPED
                self.world.exit(trial_id, EndReason.KILLED if asked is Action.KILL else reason)
        raise AssertionError("the experiment does not end")

    def _must_end_when_killed(self) -> None:
        if self.is_over:
            assert all(state.is_final for state in self.world.states())
            return
        self.world.record.ask(Desired.KILLED)
        self.world.crash()
        self._runs_end_as_asked()
        assert self.is_over
        assert all(state.is_final for state in self.world.states())
        assert not self.world.live


TestRunner = Runner.TestCase
TestRunner.settings = settings(stateful_step_count=40)
