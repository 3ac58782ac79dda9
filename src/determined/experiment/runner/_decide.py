"""The decisions of a runner. Pure: no files, no database, no clock, no processes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from determined import errors
from determined.experiment.executors import EndReason, Handle, RunExit
from determined.experiment.runner._outcome import StopReason, TrialOutcome, next_state, next_state_without_run
from determined.experiment.runner._search_replay import SearchReplay
from determined.experiment.runner._state import Action, Command, Inputs, OpenTrial, Rules, RunnerState
from determined.experiment.search import Began, Create, Event, Exited, Operation, Shutdown, Stop
from determined.tracking import (
    Changeset,
    Control,
    Desired,
    ExperimentChange,
    NewTrial,
    RunState,
    SearchEvent,
    TrialChange,
    TrialEntry,
    TrialRequest,
)

logger = logging.getLogger("determined.experiment")

MAX_INVALID_IN_A_ROW = 100
"""Trials in a row that may end because of invalid hyperparameters; each of them is replaced."""
_STOP_REASONS = {Desired.PAUSED: StopReason.PAUSE, Desired.CANCELED: StopReason.CANCEL, Desired.KILLED: StopReason.KILL}
_FINAL = {
    StopReason.PAUSE: RunState.PAUSED,
    StopReason.ERROR: RunState.ERROR,
    StopReason.CANCEL: RunState.CANCELED,
    StopReason.KILL: RunState.CANCELED,
}


def restore(
    rules: Rules,
    search: SearchReplay,
    control: Control,
    trials: Sequence[TrialEntry],
    open_runs: Mapping[int, Handle | None],
) -> tuple[RunnerState, list[Command]]:
    """Return the state of a runner that begins with what is on record, and what it does first.

    `open_runs` has the handles of the runs that have not ended on record, by the ids of their trials.
    """
    state = RunnerState(rules=rules, search=search, control=control)
    if control.state is RunState.STOPPING_ERROR:  # an earlier runner found that the experiment cannot go on
        state.stop_reason = StopReason.ERROR
    for entry in trials:
        if entry.state.is_final:
            state.final_states[entry.id] = entry.state
            continue
        is_running = entry.id in open_runs
        trial = OpenTrial(
            id=entry.id,
            request_id=entry.request_id,
            hparams=entry.hparams,
            seed=entry.seed,
            run_id=entry.run_id,
            restarts=entry.restarts,
            stop_reason=StopReason.of_state(entry.state) if is_running else None,
            is_running=is_running,
            is_adopted=is_running,
            handle=open_runs.get(entry.id),
            is_checked=entry.run_id == 0,
            slots=rules.slots.min,  # of a run that an earlier runner started, at least
        )
        state.trials[trial.id] = trial
    return state, [Command(Action.ADOPT, trial.id) for trial in state.running()]


def decide(state: RunnerState, inputs: Inputs) -> tuple[RunnerState, Changeset, list[Command]]:
    """Return the next state, what to store at once, and what to do after that, in its order.

    The same state and inputs always give the same result. The state is updated in place, since a search is too large to
    be copied at each step: go on with the one that is returned.
    """
    step = _Step(state, inputs)
    step.take_in()
    step.plan()
    return state, step.changeset(), step.commands


class _Step:
    """One step in the making."""

    def __init__(self, state: RunnerState, inputs: Inputs) -> None:
        self.commands: list[Command] = []
        self._state = state
        self._inputs = inputs
        self._events: list[SearchEvent] = []
        self._trial_changes: list[TrialChange] = []
        self._experiment: dict[str, Any] = {}

    def take_in(self) -> None:
        """Take in what has happened."""
        self._add_created()
        self._begin()
        self._follow_control()
        self._take_in_validations()  # before exits: those of a run come before its exit
        for exit in self._inputs.exits:
            self._take_in_exit(exit)
        self._record_handles()
        for trial_id, checkpoint in self._inputs.checkpoints.items():
            if (trial := self._state.trials.get(trial_id)) is not None:
                trial.checkpoint, trial.is_checked, trial.is_being_checked = checkpoint, True, False

    def plan(self) -> None:
        """Decide what to do about it."""
        if self._state.stop_reason is not None:
            self._stop_all(self._state.stop_reason)
        self._use_placements()
        self._use_allowance()
        self._set_wanted_slots()
        self._set_progress()
        self._conclude()

    def changeset(self) -> Changeset:
        """Return what to store; `Changeset()` if there is nothing."""
        state = self._state
        snapshot = state.search.due_snapshot() if self._events and not state.is_ending else None
        return Changeset(
            events=tuple(self._events),
            snapshot=snapshot,
            new_trials=tuple(
                NewTrial(
                    request_id=one.request_id, hparams=one.hparams, seed=one.seed, entrypoint=state.rules.entrypoint
                )
                for one in state.created
            ),
            trial_changes=tuple(self._trial_changes),
            experiment_change=ExperimentChange(**self._experiment) if self._experiment else None,
        )

    # What has happened

    def _add_created(self) -> None:
        for id, made in zip(self._inputs.created, self._state.created, strict=True):
            trial = OpenTrial(id=id, request_id=made.request_id, hparams=made.hparams, seed=made.seed)
            self._state.trials[id] = trial
            logger.info("trial %d: created with %s", id, made.hparams)
        self._state.created = []

    def _begin(self) -> None:
        if self._state.has_begun:
            return
        self._state.has_begun = True
        self._set_state(RunState.ACTIVE)
        if self._state.search.last_event == 0:
            self._feed(Began())

    def _follow_control(self) -> None:
        state, inputs = self._state, self._inputs
        if inputs.control is not None:
            state.control = inputs.control
        if inputs.asked_to_leave and state.control.desired is Desired.ACTIVE:
            self._experiment["desired"] = Desired.PAUSED
            state.control = dataclasses.replace(state.control, desired=Desired.PAUSED)
        wanted = _STOP_REASONS.get(state.control.desired)
        if wanted is not None and wanted > (state.stop_reason or 0):
            logger.info("the experiment is to be %s", state.control.desired.value)
            state.stop_reason = wanted
        elif wanted is None and state.stop_reason is StopReason.PAUSE:
            state.stop_reason = None  # activated again before all trials had stopped
        for trial_id, request in state.control.requests.items():
            if (trial := state.trials.get(trial_id)) is not None:
                self._ask_to_stop(trial, StopReason.KILL if request is TrialRequest.KILL else StopReason.CANCEL)

    def _take_in_validations(self) -> None:
        search = self._state.search
        for report in self._inputs.validations:
            trial = self._state.trials.get(report.trial_id)
            if trial is not None and not self._state.is_ending:
                self._feed(search.validated(trial.request_id, report), report.id)
            search.last_report = max(search.last_report, report.id)

    def _take_in_exit(self, exit: RunExit) -> None:
        state, rules = self._state, self._state.rules
        trial = state.trials.get(exit.trial_id)
        if trial is None or not trial.is_running or trial.run_id != exit.run_id:
            return
        self._command(Action.RELEASE, trial)
        if trial.is_adopted and exit.reason is EndReason.KILLED and trial.stop_reason is not StopReason.KILL:
            # It was killed together with its runner, which is not a failure of the trial.
            exit = dataclasses.replace(exit, reason=EndReason.STOPPED, message="its runner was gone", runner_gone=True)
        outcome = next_state(exit, trial.stop_reason, trial.restarts, rules.max_restarts, rules.fatal_patterns)
        trial.restarts += outcome.is_failure and outcome.state is None
        trial.is_running = trial.is_adopted = trial.is_checked = False
        trial.stop_reason = trial.placement = trial.handle = None
        reason = f"{exit.reason.value.lower()}{': ' if exit.message else ''}{exit.message}"
        logger.info("trial %d: run %d %s", trial.id, exit.run_id, reason)
        change = TrialChange(
            trial_id=trial.id,
            run_ended=exit.ended or self._inputs.time,
            run_reason=reason,
            restarts=trial.restarts,
            state=RunState.PAUSED if state.stop_reason is StopReason.PAUSE else RunState.ACTIVE,
        )
        if outcome.state is None:
            self._trial_changes.append(change)
        else:
            self._count_invalid(exit)
            self._close(trial, outcome, change)

    def _count_invalid(self, exit: RunExit) -> None:
        """Let the experiment fail at the last of too many trials with invalid hyperparameters."""
        state = self._state
        state.invalid_in_a_row = state.invalid_in_a_row + 1 if exit.reason is EndReason.INVALID_HP else 0
        if state.invalid_in_a_row == MAX_INVALID_IN_A_ROW:
            self._fail(
                f"{MAX_INVALID_IN_A_ROW} trials in a row gave up on their hyperparameters, the last one because of: "
                f"{exit.message}. Narrow the ranges, or check what raises InvalidHP."
            )

    def _record_handles(self) -> None:
        """Store what identifies the runs, and give them their slots."""
        for trial_id, handle in self._inputs.handles.items():
            trial = self._state.trials.get(trial_id)
            if trial is not None and trial.is_running and trial.handle is None:
                trial.handle = handle
                self._trial_changes.append(TrialChange(trial_id=trial_id, handle=handle))
                self._command(Action.ATTACH, trial)

    # What the search wants

    def _feed(self, event: Event, report: int | None = None) -> None:
        """Tell the search of an event, and do what it says; the experiment fails if the search cannot go on."""
        try:
            stored, operations = self._state.search.handle(event, self._inputs.time, report)
        except errors.InvalidExperimentException as error:
            self._fail(str(error))
            return
        self._events.append(stored)
        for operation in operations:
            self._perform(operation)

    def _perform(self, operation: Operation) -> None:
        match operation:
            case Create():
                self._state.created.append(operation)
            case Stop(request_id=request_id):
                for trial in [one for one in self._state.trials.values() if one.request_id == request_id]:
                    self._ask_to_stop(trial, StopReason.SEARCH)
            case Shutdown(failed=failed, canceled=canceled):
                self._state.outcome = (
                    RunState.ERROR if failed else RunState.CANCELED if canceled else RunState.COMPLETED
                )

    def _fail(self, message: str) -> None:
        logger.error("The experiment cannot go on: %s", message)
        self._state.stop_reason = max(self._state.stop_reason or StopReason.ERROR, StopReason.ERROR)

    # How trials and the experiment end

    def _ask_to_stop(self, trial: OpenTrial, reason: StopReason) -> None:
        if trial.stop_reason is not None and trial.stop_reason >= reason:
            return
        if trial.is_running:
            trial.stop_reason = reason
            self._command(Action.KILL if reason is StopReason.KILL else Action.STOP, trial)
            if reason.is_for_good:
                self._trial_changes.append(TrialChange(trial_id=trial.id, state=reason.stopping_state))
        elif reason.is_for_good:
            self._close(trial, next_state_without_run(reason), TrialChange(trial_id=trial.id))

    def _close(self, trial: OpenTrial, outcome: TrialOutcome, change: TrialChange) -> None:
        """End a trial for good, and tell the search unless the experiment ends too."""
        assert outcome.exit is not None
        assert outcome.state is not None
        del self._state.trials[trial.id]
        self._state.final_states[trial.id] = outcome.state
        logger.info("trial %d: %s%s", trial.id, outcome.state, f" ({outcome.reason})" if outcome.reason else "")
        self._trial_changes.append(
            dataclasses.replace(change, state=outcome.state, reason=outcome.reason, clears_request=True)
        )
        if not self._state.is_ending:
            self._feed(Exited(trial.request_id, outcome.exit))

    def _stop_all(self, reason: StopReason) -> None:
        if reason.is_for_good:
            self._set_state(reason.stopping_state)
        for trial in list(self._state.trials.values()):
            self._ask_to_stop(trial, reason)

    def _conclude(self) -> None:
        """End the experiment when there is nothing left to do."""
        state = self._state
        if state.outcome is None:
            state.outcome = self._outcome()
        if state.outcome is None:
            return
        if state.outcome is RunState.PAUSED:
            self._trial_changes += [TrialChange(trial_id=id, state=RunState.PAUSED) for id in state.trials]
        if state.outcome is RunState.COMPLETED:
            self._experiment["progress"] = 1.0
        self._experiment["wanted_slots"] = 0
        self._set_state(state.outcome)
        logger.info("the experiment is %s", state.outcome.value)

    def _set_state(self, new: RunState) -> None:
        if new is not self._state.control.state:
            self._experiment["state"] = new
            self._state.control = dataclasses.replace(self._state.control, state=new)

    def _outcome(self) -> RunState | None:
        state = self._state
        if state.search.has_ended and not state.trials:  # it had ended before, and trials were continued
            states = set(state.final_states.values())
            return states.pop() if len(states) == 1 else RunState.COMPLETED
        if state.stop_reason is None or state.created:
            return None
        is_over = not (state.trials if state.is_ending else state.running())
        return _FINAL[state.stop_reason] if is_over else None

    # Slots

    def _use_placements(self) -> None:
        """Start the trials that got slots, unless they should not run any more."""
        for trial_id, placement in self._inputs.placements.items():
            trial = self._state.trials.get(trial_id)
            if placement is None:
                continue
            if trial is None or not trial.is_waiting or self._state.stop_reason is not None:
                self.commands.append(Command(Action.RELEASE, trial_id))
                continue
            trial.run_id += 1
            trial.is_running, trial.placement, trial.slots = True, placement, len(placement["slots"])
            steps = trial.checkpoint.steps_completed if trial.checkpoint is not None else 0
            self._trial_changes.append(
                TrialChange(trial_id=trial_id, state=RunState.ACTIVE, run_id=trial.run_id, started_from_step=steps)
            )
            self._command(Action.START, trial)
            logger.info("trial %d: run %d starts at step %d on slots %s", trial_id, trial.run_id, steps, placement)

    def _use_allowance(self) -> None:
        """Ask for slots for trials that wait, or ask trials to make room for other experiments."""
        state, allowance = self._state, self._inputs.allowance
        if allowance is None:
            return
        room = allowance
        for trial in state.running():
            room -= trial.slots
            if room < 0:
                self._ask_to_stop(trial, StopReason.YIELD)
        for trial, slots in zip(state.waiting(), self._divided(room), strict=False):
            trial.slots = slots
            if trial.is_checked:
                self._command(Action.TAKE, trial)
            elif not trial.is_being_checked:
                trial.is_being_checked = True
                self._command(Action.FIND_CHECKPOINT, trial)

    def _divided(self, room: int) -> list[int]:
        """Return the slots of the trials that start next: as many trials as possible, with equal parts of the room."""
        trials = min(max(room, 0) // self._state.rules.slots.min, len(self._state.waiting()))
        each, rest = divmod(room, trials) if trials else (0, 0)
        return [min(each + (number < rest), self._state.rules.slots.max) for number in range(trials)]

    def _set_wanted_slots(self) -> None:
        state = self._state
        # Trials that run keep what they have.
        waiting = (len(state.waiting()) + len(state.created)) * state.rules.slots.max
        limit = state.rules.capacity if state.control.max_slots is None else state.control.max_slots
        wanted = min(sum(trial.slots for trial in state.running()) + waiting, limit)
        if wanted != state.wanted_slots:
            self._experiment["wanted_slots"] = state.wanted_slots = wanted

    def _set_progress(self) -> None:
        if self._inputs.fractions is None:
            return
        progress = round(self._state.search.progress(self._inputs.fractions), 4)
        if progress != self._state.progress:
            self._experiment["progress"] = self._state.progress = progress

    def _command(self, action: Action, trial: OpenTrial) -> None:
        self.commands.append(Command(action, trial.id))
