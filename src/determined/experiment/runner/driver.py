"""Drives one experiment: gathers what has happened, lets `decide` decide, stores and performs its decisions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from determined.experiment.executors import Allocator, Executor, Handle, Placement, RunExit
from determined.experiment.runner._decide import decide, restore
from determined.experiment.runner._run_specs import CheckpointFinder, RunSpecs
from determined.experiment.runner._search_replay import SearchReplay
from determined.experiment.runner._state import Action, Command, Inputs, Rules, RunnerState
from determined.tracking import Changeset, ExperimentStore, RunState, Validation, when_available

P = ParamSpec("P")
T = TypeVar("T")

POLL_S = 0.1
"""Seconds between two steps while nothing happens."""
_ALLOWANCE_PERIOD_S = 1.0
_PROGRESS_PERIOD_S = 2.0
_PROGRESS_SHARE = 0.02
"""The share of the time that may go into reading the progress of all trials."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Driver:
    """Runs the trials of an experiment until it ends or is paused.

    Every decision is stored before it is performed, all of a step at once: if a driver is killed at any moment, the
    next one goes on from the record.
    """

    rules: Rules
    store: ExperimentStore
    search: SearchReplay
    allocator: Allocator
    executor: Executor
    specs: RunSpecs
    finder: CheckpointFinder
    asked_to_leave: bool = False
    """Whether `leave` was called."""
    allowance_at: float = 0.0
    """When to look at what other experiments want; at any time while trials wait."""
    _progress_at: float = 0.0
    _is_busy: bool = True
    _created: list[int] = dataclasses.field(default_factory=list)
    _exits: list[RunExit] = dataclasses.field(default_factory=list)
    _placements: dict[int, Placement | None] = dataclasses.field(default_factory=dict)

    def leave(self) -> None:
        """Pause the experiment at the next step, as when this process is asked to end. Signal handlers may call it."""
        self.asked_to_leave = True

    def run(self) -> RunState:
        """Run trials until the experiment ends or is paused; returns the state in which it is left."""
        trials = self.store.trials()
        latest = {one.id: self.store.runs(one.id)[-1] for one in trials if one.run_id and not one.state.is_final}
        open_runs = {id: run.handle for id, run in latest.items() if run.ended is None}
        state, commands = restore(self.rules, self.search, self.store.control(), trials, open_runs)
        self._perform(state, commands)
        while state.outcome is None:
            state, changes, commands = decide(state, self._gather(state))
            self._is_busy = changes != Changeset()
            self._created = self._use(self.store.commit, changes) if self._is_busy else []
            self._perform(state, commands)
        return state.outcome

    def _gather(self, state: RunnerState) -> Inputs:
        """Return what has happened, after waiting for an exit for at most `POLL_S`."""
        checkpoints = self.finder.found()
        exits = self._exits + self.executor.poll(0.0 if self._is_busy or checkpoints else POLL_S)
        self._exits = []
        # Validations are read after exits, so that all of a run are there with its exit.
        has_news = exits or self.asked_to_leave or not state.has_begun or self._use(self.store.changed)
        inputs = Inputs(
            time=time.time(),
            created=self._created,
            exits=exits,
            control=self._use(self.store.control) if has_news else None,
            validations=self._use(self._validations, state.search.last_report) if has_news else (),
            asked_to_leave=self.asked_to_leave,
            handles=self._new_handles(state),
            placements=self._placements,
            checkpoints=checkpoints,
            allowance=self._allowance(state),
            fractions=self._fractions(),
        )
        self._placements = {}
        return inputs

    def _validations(self, after: int) -> list[Validation]:
        return list(self.store.new_validations(after))

    def _new_handles(self, state: RunnerState) -> dict[int, Handle]:
        unknown = [trial.id for trial in state.running() if trial.handle is None and not trial.is_adopted]
        return {id: handle for id in unknown if (handle := self.executor.handle(id)) is not None}

    def _allowance(self, state: RunnerState) -> int | None:
        if not state.has_begun or not (state.waiting() or time.monotonic() >= self.allowance_at):
            return None
        self.allowance_at = time.monotonic() + _ALLOWANCE_PERIOD_S
        return self._use(self.allocator.allowance, state.wanted_slots, state.control.priority)

    def _fractions(self) -> dict[str, float] | None:
        if (began := time.monotonic()) < self._progress_at:
            return None
        trials = self._use(self.store.trials)
        self._progress_at = began + max(_PROGRESS_PERIOD_S, (time.monotonic() - began) / _PROGRESS_SHARE)
        return {trial.request_id: trial.progress or 0.0 for trial in trials if not trial.state.is_final}

    def _perform(self, state: RunnerState, commands: Iterable[Command]) -> None:
        for action, id in commands:
            match action:
                case Action.ADOPT:
                    self.executor.adopt(self.specs.spec(state.trials[id]), state.trials[id].handle)
                case Action.FIND_CHECKPOINT:
                    self._use(self.finder.find, id)
                case Action.TAKE:
                    if None not in self._placements.values():  # else there are not enough slots for this one either
                        self._placements[id] = placement = self._use(self.allocator.take, id, state.trials[id].slots)
                        self._is_busy |= placement is not None
                case Action.ATTACH:
                    self._use(self.allocator.attach, id, state.trials[id].handle or {})
                case Action.RELEASE:
                    self._use(self.allocator.release, id)
                case Action.START:
                    self.executor.start(self.specs.spec(state.trials[id]))
                case Action.STOP:
                    self.executor.stop(id)
                case Action.KILL:
                    self.executor.kill(id)

    def _use(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a call to the database returns. While that is full or away, exits wait for the next step."""

        def wait(seconds: float) -> None:
            self._exits += self.executor.poll(seconds)

        return when_available(lambda: call(*args, **kwargs), lambda: self.asked_to_leave, wait)
