"""A record, an executor and an allocator in memory, to test the decisions of a runner alone."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from determined.experiment import config as configs
from determined.experiment.executors import EndReason, RunExit
from determined.experiment.runner._decide import decide, restore
from determined.experiment.runner._search_replay import SearchReplay
from determined.experiment.runner._state import Action, Command, Inputs, Rules, RunnerState
from determined.tracking import (
    Changeset,
    CheckpointRecord,
    Control,
    Desired,
    RunState,
    SearchEvent,
    Snapshot,
    TrialEntry,
    TrialRequest,
    Validation,
)


class Crash(Exception):
    """Stands for the death of the runner."""


class Record:
    """What is stored. Refuses what no database should be asked to store."""

    def __init__(self) -> None:
        self.control = Control(
            desired=Desired.ACTIVE,
            state=RunState.ACTIVE,
            progress=None,
            started=0.0,
            max_slots=None,
            priority=None,
            requests={},
        )
        self.trials: dict[int, TrialEntry] = {}
        self.runs: dict[tuple[int, int], str | None] = {}
        """The reason of the end of each run, by trial and run; None while it is open."""
        self.stored_events: list[SearchEvent] = []
        self.validations: list[Validation] = []
        self._snapshot: Snapshot | None = None

    def snapshot(self) -> Snapshot | None:
        return self._snapshot

    def events(self, after: int = 0) -> list[SearchEvent]:
        return self.stored_events[after:]

    def open_runs(self) -> dict[int, Mapping[str, Any] | None]:
        return {trial_id: None for (trial_id, _), reason in self.runs.items() if reason is None}

    def ask(self, desired: Desired | None = None, **requests: TrialRequest) -> None:
        asked = {**self.control.requests, **{int(id.removeprefix("trial")): what for id, what in requests.items()}}
        self.control = dataclasses.replace(self.control, desired=desired or self.control.desired, requests=asked)

    def commit(self, changes: Changeset) -> list[int]:
        numbers = [event.number for event in changes.events]
        assert numbers == list(range(len(self.stored_events) + 1, len(self.stored_events) + len(numbers) + 1))
        self.stored_events += changes.events
        self._snapshot = changes.snapshot or self._snapshot
        ids = [self._add(new.request_id, new.hparams, new.seed) for new in changes.new_trials]
        for change in changes.trial_changes:
            self._change(change)
        if (of_all := changes.experiment_change) is not None:
            state, desired = of_all.state or self.control.state, of_all.desired or self.control.desired
            self.control = dataclasses.replace(self.control, state=state, desired=desired)
        return ids

    def _add(self, request_id: str, hparams: Mapping[str, Any], seed: int) -> int:
        id = len(self.trials) + 1
        self.trials[id] = TrialEntry(
            id=id,
            request_id=request_id,
            state=RunState.ACTIVE,
            reason=None,
            status=None,
            run_id=0,
            restarts=0,
            process=None,
            hparams=hparams,
            seed=seed,
            progress=None,
            requested=None,
            started=0.0,
            ended=None,
        )
        return id

    def _change(self, change: Any) -> None:
        trial = self.trials[change.trial_id]
        assert not trial.state.is_final, "a trial ends once"
        if change.run_ended is not None:
            assert self.runs[trial.id, trial.run_id] is None, "a run ends once"
            self.runs[trial.id, trial.run_id] = change.run_reason
        if change.run_id is not None:
            assert change.run_id == trial.run_id + 1
            assert all(reason is not None for (id, _), reason in self.runs.items() if id == trial.id)
            self.runs[trial.id, change.run_id] = None
        if change.clears_request:
            open_requests = {id: one for id, one in self.control.requests.items() if id != trial.id}
            self.control = dataclasses.replace(self.control, requests=open_requests)
        given = {"state": change.state, "run_id": change.run_id, "restarts": change.restarts, "reason": change.reason}
        given = {name: value for name, value in given.items() if value is not None}
        self.trials[trial.id] = dataclasses.replace(trial, **given)


class World:
    """An experiment with all that a runner deals with. `step` lets the runner take one step."""

    def __init__(self, searcher: Mapping[str, Any], slots: int = 2, **settings: Any) -> None:
        lr = {"type": "double", "minval": 0.0, "maxval": 1.0}
        self.config = configs.from_map(
            {
                "entrypoint": "python3 train.py",
                "reproducibility": {"experiment_seed": 1},
                "hyperparameters": {"lr": lr},
                "searcher": {"metric": "loss", **searcher},
                **settings,
            }
        )
        self.record = Record()
        self.slots = slots
        self.held: dict[int, int] = {}
        """How many slots each trial has."""
        self.live: dict[int, int] = {}
        """The runs that go on, by trial."""
        self.asked: dict[int, Action] = {}
        """What the runs that go on were asked for."""
        self.exits: dict[tuple[int, int], RunExit] = {}
        """The exits of all runs that ended, as an executor keeps them in files."""
        self.checkpoints: dict[int, CheckpointRecord] = {}
        self.asked_to_leave = False
        self.performed: list[Command] = []
        self.changes = Changeset()
        self.state = self._new_runner()

    # What happens

    def exit(self, trial_id: int, reason: EndReason, **more: Any) -> None:
        """End the run of a trial."""
        run_id = self.live.pop(trial_id)
        self.asked.pop(trial_id, None)
        exit = RunExit(trial_id=trial_id, run_id=run_id, reason=reason, message="words", ended=1.0, **more)
        self.exits[trial_id, run_id] = exit
        self._new_exits.append(exit)

    def validate(self, trial_id: int, loss: float, **metrics: float) -> None:
        """Report a validation of a trial."""
        record = self.record
        record.validations.append(
            Validation(
                id=len(record.validations) + 1,
                trial_id=trial_id,
                run_id=self.live[trial_id],
                steps_completed=1,
                metrics={"loss": loss, **metrics},
                time=1.0,
            )
        )

    def crash(self) -> None:
        """Let the runner die, and begin another one. The runs of the dead one go on until they notice."""
        self.held = {id: slots for id, slots in self.held.items() if id in self.live}
        self.state = self._new_runner()

    def _new_runner(self) -> RunnerState:
        self._new_exits: list[RunExit] = []
        self._created: list[int] = []
        self._placements: dict[int, dict[str, Any] | None] = {}
        self._found: dict[int, CheckpointRecord | None] = {}
        state, commands = self.restored()
        self._perform(commands)
        return state

    def restored(self) -> tuple[RunnerState, list[Command]]:
        """Return what a runner that begins now would begin with."""
        record = self.record
        search = SearchReplay(self.config, record, pathlib.Path())
        rules = Rules.of(self.config, self.slots)
        return restore(rules, search, record.control, list(record.trials.values()), record.open_runs())

    # The runner

    def step(self, crash_before: str = "") -> RunState | None:
        """Take one step, up to a crash before "storing" or "performing" its decisions; returns the outcome."""
        inputs = self._gather()
        again = decide(copy.deepcopy(self.state), inputs)
        self.state, self.changes, commands = decide(self.state, inputs)
        assert (self.changes, commands) == again[1:], "the same state and inputs must give the same decisions"
        if crash_before == "storing":
            self.crash()
            return None
        self._created = self.record.commit(self.changes)
        for exit in inputs.exits:
            assert self.record.runs[exit.trial_id, exit.run_id] is not None, "no exit is lost"
        if crash_before == "performing":
            self.crash()
            return None
        self._perform(commands)
        self.performed = commands
        return self.state.outcome

    def settle(self, steps: int = 10) -> RunState | None:
        """Take steps until nothing changes any more, or the runner is done."""
        for _ in range(steps):
            if self.step() is not None or (self.changes == Changeset() and not self.performed):
                break
        return self.state.outcome

    def _gather(self) -> Inputs:
        needs_slots = self.state.has_begun
        inputs = Inputs(
            time=1.0,
            created=self._created,
            exits=self._new_exits,
            validations=self.record.validations[self.state.search.last_report :],
            control=self.record.control,
            asked_to_leave=self.asked_to_leave,
            placements=self._placements,
            checkpoints=self._found,
            allowance=min(self.state.wanted_slots, self.slots) if needs_slots else None,
            fractions={},
        )
        self._created, self._new_exits, self._placements, self._found = [], [], {}, {}
        return inputs

    def _perform(self, commands: list[Command]) -> None:
        for action, id in commands:
            match action:
                case Action.TAKE:
                    free = min(self.slots - sum(self.held.values()), self.state.trials[id].slots)
                    is_enough = free >= self.state.rules.slots.min and id not in self.held
                    self._placements[id] = {"slots": [id] * free} if is_enough else None
                    self.held |= {id: free} if is_enough else {}
                case Action.RELEASE:
                    self.held.pop(id, None)
                case Action.FIND_CHECKPOINT:
                    self._found[id] = self.checkpoints.get(id)
                case Action.START:
                    assert id not in self.live, "a trial has one run at a time"
                    assert id in self.held
                    self.live[id] = self.state.trials[id].run_id
                case Action.ADOPT:
                    self._adopt(id)
                case Action.STOP | Action.KILL if id in self.live:
                    self.asked[id] = action

    def _adopt(self, id: int) -> None:
        run_id = self.record.trials[id].run_id
        if (exit := self.exits.get((id, run_id))) is not None:
            self._new_exits.append(exit)
        elif id in self.live:
            self.asked[id] = Action.STOP  # the executor of the dead runner is gone, so that its runs stop
        else:
            self._new_exits.append(RunExit(trial_id=id, run_id=run_id, reason=EndReason.KILLED, ended=1.0))

    def states(self) -> list[RunState]:
        """Return the states of all trials on record."""
        return [trial.state for trial in self.record.trials.values()]
