"""Drives one experiment: gathers what has happened, lets `decide` decide, stores and performs its decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from determined.experiment.config import ExperimentConfig
from determined.experiment.executors import Allocator, Executor, Handle, Placement, RunExit
from determined.experiment.runner._decide import decide, restore
from determined.experiment.runner._disk_space import when_there_is_space
from determined.experiment.runner._run_specs import CheckpointFinder, RunSpecs
from determined.experiment.runner._search_replay import SearchReplay
from determined.experiment.runner._state import Action, Command, Inputs, Rules, RunnerState
from determined.tracking import Changeset, ExperimentStore, RunState

P = ParamSpec("P")
T = TypeVar("T")

POLL_S = 0.1
"""Seconds between two steps while nothing happens."""
ALLOWANCE_PERIOD_S = 1.0
"""Seconds between two looks at what other experiments want, while no trial waits."""
_PROGRESS_PERIOD_S = 2.0
_PROGRESS_SHARE = 0.02
"""The share of the time that may go into reading the progress of all trials."""


class Driver:
    """Runs the trials of an experiment until it ends or is paused.

    Every decision is stored before it is performed, all of a step at once: if a driver is killed at any moment, the
    next one goes on from the record.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        store: ExperimentStore,
        search: SearchReplay,
        allocator: Allocator,
        executor: Executor,
        specs: RunSpecs,
        finder: CheckpointFinder,
    ) -> None:
        self.asked_to_leave = False
        """Whether `leave` was called."""
        self._rules = Rules.of(config, allocator.capacity)
        self._store, self._search, self._allocator, self._executor = store, search, allocator, executor
        self._specs, self._finder = specs, finder
        self._is_busy = True
        self._created: list[int] = []
        self._exits: list[RunExit] = []
        self._placements: dict[int, Placement | None] = {}
        self._allowance_at = self._progress_at = 0.0

    def leave(self) -> None:
        """Pause the experiment at the next step, as when this process is asked to end. Signal handlers may call it."""
        self.asked_to_leave = True

    def run(self) -> RunState:
        """Run trials until the experiment ends or is paused; returns the state in which it is left."""
        trials = self._store.trials()
        latest = {one.id: self._store.runs(one.id)[-1] for one in trials if one.run_id and not one.state.is_final}
        open_runs = {id: run.handle for id, run in latest.items() if run.ended is None}
        state, commands = restore(self._rules, self._search, self._store.control(), trials, open_runs)
        self._perform(state, commands)
        while state.outcome is None:
            state, changes, commands = decide(state, self._gather(state))
            self._is_busy = changes != Changeset()
            self._created = self._write(self._store.commit, changes) if self._is_busy else []
            self._perform(state, commands)
        return state.outcome

    def _gather(self, state: RunnerState) -> Inputs:
        """Return what has happened, after waiting for an exit for at most `POLL_S`."""
        checkpoints = self._finder.found()
        exits = self._exits + self._executor.poll(0.0 if self._is_busy or checkpoints else POLL_S)
        # Validations are read after exits, so that all of a run are there with its exit.
        has_news = exits or self.asked_to_leave or not state.has_begun or self._store.changed()
        inputs = Inputs(
            time=time.time(),
            created=self._created,
            exits=exits,
            control=self._store.control() if has_news else None,
            validations=list(self._store.new_validations(state.search.last_report)) if has_news else (),
            asked_to_leave=self.asked_to_leave,
            handles=self._new_handles(state),
            placements=self._placements,
            checkpoints=checkpoints,
            allowance=self._allowance(state),
            fractions=self._fractions(),
        )
        self._exits, self._placements = [], {}
        return inputs

    def _new_handles(self, state: RunnerState) -> dict[int, Handle]:
        unknown = [trial.id for trial in state.running() if trial.handle is None and not trial.is_adopted]
        return {id: handle for id in unknown if (handle := self._executor.handle(id)) is not None}

    def _allowance(self, state: RunnerState) -> int | None:
        is_due = state.waiting() or time.monotonic() >= self._allowance_at + ALLOWANCE_PERIOD_S
        if not is_due or not state.has_begun:
            return None
        self._allowance_at = time.monotonic()
        return self._allocator.allowance(state.wanted_slots, state.control.priority)

    def _fractions(self) -> dict[str, float] | None:
        if (began := time.monotonic()) < self._progress_at:
            return None
        trials = self._store.trials()
        self._progress_at = began + max(_PROGRESS_PERIOD_S, (time.monotonic() - began) / _PROGRESS_SHARE)
        return {trial.request_id: trial.progress or 0.0 for trial in trials if not trial.state.is_final}

    def _perform(self, state: RunnerState, commands: Iterable[Command]) -> None:
        for action, id in commands:
            match action:
                case Action.ADOPT:
                    self._executor.adopt(self._specs.spec(state.trials[id]), state.trials[id].handle)
                case Action.FIND_CHECKPOINT:
                    self._finder.find(id)
                case Action.TAKE:
                    if None not in self._placements.values():  # else there are not enough slots for this one either
                        self._placements[id] = placement = self._write(self._allocator.take, id)
                        self._is_busy |= placement is not None
                case Action.ATTACH:
                    self._write(self._allocator.attach, id, state.trials[id].handle or {})
                case Action.RELEASE:
                    self._write(self._allocator.release, id)
                case Action.START:
                    self._executor.start(self._specs.spec(state.trials[id]))
                case Action.STOP:
                    self._executor.stop(id)
                case Action.KILL:
                    self._executor.kill(id)

    def _write(self, write: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a call to the database returns. While its disk is full, exits are collected for the next step."""

        def wait(seconds: float) -> None:
            self._exits += self._executor.poll(seconds)

        return when_there_is_space(lambda: write(*args, **kwargs), lambda: self.asked_to_leave, wait)
