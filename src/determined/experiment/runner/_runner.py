"""Drive one experiment: search, slots, trials, record. One process for an experiment."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from determined import errors
from determined.experiment.config import ExperimentConfig
from determined.experiment.executors import Allocator, EndReason, Executor, RunExit, RunSpec
from determined.experiment.runner._changeset import ChangesetBuilder
from determined.experiment.runner._disk_space import when_there_is_room
from determined.experiment.runner._outcome import StopReason, TrialOutcome, next_state, next_state_without_run
from determined.experiment.runner._run_specs import Runs
from determined.experiment.runner._search_replay import SearchReplay
from determined.experiment.runner._trials import OpenTrial, OpenTrials
from determined.experiment.search import Create, Operation, Shutdown, Stop
from determined.tracking import Desired, ExperimentStore, RunState, TrialChange, TrialRequest

logger = logging.getLogger("determined.experiment")

T = TypeVar("T")

POLL = 0.1
"""Seconds between two looks at the record."""
_PROGRESS_EVERY = 2.0
_PROGRESS_SHARE = 50
"""Progress is looked at for one part in so many of the time, however many trials there are."""
_MOST_INVALID = 100
"""Trials in a row that may give up on their hyperparameters, each of which is replaced."""
_SHARE_EVERY = 1.0
"""Seconds between two looks at what other experiments want."""
_ENDINGS = {Desired.PAUSED: StopReason.PAUSE, Desired.CANCELED: StopReason.CANCEL, Desired.KILLED: StopReason.KILL}
_FINAL = {
    StopReason.PAUSE: RunState.PAUSED,
    StopReason.ERROR: RunState.ERROR,
    StopReason.CANCEL: RunState.CANCELED,
    StopReason.KILL: RunState.CANCELED,
}


class Runner:
    """Runs the trials of an experiment until it ends, or is paused.

    Everything that happens is stored before it is acted on, all that belongs together at once: a runner that is killed
    at any moment is followed by one that goes on from the record.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        ledger: ExperimentStore,
        searching: SearchReplay,
        allocator: Allocator,
        executor: Executor,
        runs: Runs,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._searching = searching
        self._allocator = allocator
        self._executor = executor
        self._runs = runs
        self._trials = OpenTrials()
        self._fatal_patterns = {
            one.pattern for one in config.log_policies if one.pattern and one.action == "cancel_retries"
        }
        self._control = ledger.control()
        # An earlier runner may have found that the experiment cannot go on.
        self._ending = StopReason.ERROR if self._control.state is RunState.STOPPING_ERROR else None
        self._end: RunState | None = None
        self._ends: dict[int, RunState] = {}
        self.asked_to_leave = False
        """Whether `leave` was called."""
        self._invalid_in_a_row = 0
        self._orders: list[tuple[int, bool]] = []
        self._has_news = False
        self._wanted = -1
        self._progress = -1.0
        self._progress_at = self._shared_at = 0.0

    def leave(self) -> None:
        """Pause the experiment at the next turn, as when this process is asked to end. Signal handlers may call it."""
        self.asked_to_leave = True

    def run(self) -> RunState:
        """Run trials until the experiment ends or is paused; returns the state in which it is left."""
        self._recover()
        self._take_turn(self._executor.poll(0.0), is_first=True)
        while self._end is None:
            self._take_turn(self._executor.poll(0.0 if self._has_news else POLL))
        return self._end

    # A turn

    def _take_turn(self, ended: list[RunExit], *, is_first: bool = False) -> None:
        """Take in what has happened, store what follows from it, and act on it."""
        draft = ChangesetBuilder(self._searching.last_event, self._entrypoint)
        if is_first:
            draft.change_experiment(state=RunState.ACTIVE)
        with self._failing():
            if is_first:
                self._perform(draft, self._searching.begin(draft))
        if ended or is_first or self.asked_to_leave or self._ledger.changed():
            self._look_at_control(draft)
            with self._failing():
                self._take_in_validations(draft)  # before ends: those of a trial come before its end
        for one in ended:
            with self._failing():
                self._take_in_end(draft, one)
        if self._ending is not None:
            self._end_all(draft, self._ending)
        self._note_handles(draft)
        self._look_at_progress(draft)
        starting = self._schedule(draft)
        self._conclude(draft)
        self._store(draft)
        for trial_id, at_once in self._orders:
            (self._executor.kill if at_once else self._executor.stop)(trial_id)
        self._orders.clear()
        for spec in starting:
            self._executor.start(spec)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Let the experiment end with ERROR if the search cannot go on; what else has happened is still taken in."""
        try:
            yield
        except errors.InvalidExperimentException as error:
            logger.error("The experiment cannot go on: %s", error)
            self._ending = max(self._ending or StopReason.ERROR, StopReason.ERROR)

    def _store(self, draft: ChangesetBuilder) -> None:
        self._has_news = False
        if draft.is_empty:
            return
        self._searching.keep(draft)
        turn = draft.turn()
        ids = self._stored(lambda: self._ledger.commit(turn))
        for id, made in zip(ids, draft.created, strict=True):
            self._trials.add(OpenTrial(id, made.request_id, made.hparams, made.seed))
            logger.info("trial %d: created with %s", id, made.hparams)
        self._has_news = bool(ids)

    def _stored(self, action: Callable[[], T]) -> T:
        """Return what an action returns that stores something, once the disk has room for it."""
        return when_there_is_room(action, lambda: self.asked_to_leave)

    @property
    def _entrypoint(self) -> str:
        entrypoint = self._config.entrypoint
        return entrypoint if isinstance(entrypoint, str) else shlex.join(entrypoint or [])

    # What happened

    def _look_at_control(self, draft: ChangesetBuilder) -> None:
        self._control = control = self._ledger.control()
        wanted = _ENDINGS.get(control.desired)
        if self.asked_to_leave and wanted is None:
            draft.change_experiment(desired=Desired.PAUSED)
            wanted = StopReason.PAUSE
        if wanted is not None and wanted > (self._ending or 0):
            logger.info("the experiment is to be %s", control.desired.value if wanted != StopReason.PAUSE else "PAUSED")
            self._ending = wanted
        elif wanted is None and self._ending is StopReason.PAUSE:
            self._ending = None  # activated again before all trials had stopped
        for trial_id, wish in control.wishes.items():
            if (trial := self._trials.get(trial_id)) is not None:
                self._ask_to_end(draft, trial, StopReason.KILL if wish is TrialRequest.KILL else StopReason.CANCEL)

    def _take_in_validations(self, draft: ChangesetBuilder) -> None:
        searching = self._searching
        for report in self._ledger.new_validations(searching.last_report):
            trial = self._trials.get(report.trial_id)
            if trial is not None and not self._ends_for_good:
                self._perform(draft, searching.validated(draft, trial.request_id, report))
            searching.last_report = max(searching.last_report, report.id)

    def _take_in_end(self, draft: ChangesetBuilder, ended: RunExit) -> None:
        trial = self._trials.get(ended.trial_id)
        if trial is None or not trial.is_running or trial.run_id != ended.run_id:
            return
        self._stored(lambda: self._allocator.release(trial.id))
        if trial.is_adopted and ended.reason is EndReason.KILLED and trial.ending is not StopReason.KILL:
            # It was cut off together with its runner, which is no failure of the trial.
            ended = dataclasses.replace(
                ended, reason=EndReason.STOPPED, message="its runner was gone", runner_gone=True
            )
        trial.is_running = trial.is_on_record = trial.is_adopted = False
        fate = next_state(ended, trial.ending, trial.restarts, self._config.max_restarts, self._fatal_patterns)
        trial.restarts += fate.counts and fate.state is None
        trial.ending = None
        words = f"{ended.reason.value.lower()}{': ' if ended.message else ''}{ended.message}"
        logger.info("trial %d: run %d %s", trial.id, ended.run_id, words)
        of_run = TrialChange(
            trial_id=trial.id, run_ended=ended.ended or time.time(), run_reason=words, restarts=trial.restarts
        )
        if fate.state is None:
            draft.change(dataclasses.replace(of_run, state=self._resting_state))
        else:
            with self._failing():
                self._count_invalid(ended)
            self._close(draft, trial, fate, of_run)

    def _count_invalid(self, ended: RunExit) -> None:
        """Raise `InvalidExperimentException` at the last of too many trials whose hyperparameters are invalid."""
        self._invalid_in_a_row = (self._invalid_in_a_row + 1) * (ended.reason is EndReason.INVALID_HP)
        if self._invalid_in_a_row == _MOST_INVALID:
            raise errors.InvalidExperimentException(
                f"{_MOST_INVALID} trials in a row gave up on their hyperparameters, the last one because of: "
                f"{ended.message}. Narrow the ranges, or check what raises InvalidHP."
            )

    def _close(
        self, draft: ChangesetBuilder, trial: OpenTrial, fate: TrialOutcome, change: TrialChange | None = None
    ) -> None:
        """End a trial for good, and tell the search unless the experiment ends too."""
        assert fate.exit is not None
        assert fate.state is not None
        self._trials.remove(trial)
        self._ends[trial.id] = fate.state
        logger.info("trial %d: %s%s", trial.id, fate.state, f" ({fate.reason})" if fate.reason else "")
        change = change or TrialChange(trial_id=trial.id)
        draft.change(dataclasses.replace(change, state=fate.state, reason=fate.reason, clears_wish=True))
        if not self._ends_for_good:
            self._perform(draft, self._searching.exited(draft, trial.request_id, fate.exit))

    @property
    def _ends_for_good(self) -> bool:
        return self._ending is not None and self._ending.is_for_good

    @property
    def _resting_state(self) -> RunState:
        return RunState.PAUSED if self._ending is StopReason.PAUSE else RunState.ACTIVE

    # What is to be done

    def _perform(self, draft: ChangesetBuilder, operations: Iterable[Operation]) -> None:
        """Do what the search says."""
        for operation in operations:
            match operation:
                case Create():
                    draft.created.append(operation)
                case Stop(request_id=request_id):
                    if (trial := self._trials.requested(request_id)) is not None:
                        self._ask_to_end(draft, trial, StopReason.SEARCH)
                case Shutdown(failed=failed, canceled=canceled):
                    self._end = RunState.ERROR if failed else RunState.CANCELED if canceled else RunState.COMPLETED

    def _ask_to_end(self, draft: ChangesetBuilder, trial: OpenTrial, ending: StopReason) -> None:
        if trial.ending is not None and trial.ending >= ending:
            return
        if trial.is_running:
            trial.ending = ending
            self._orders.append((trial.id, ending is StopReason.KILL))
            if ending.is_for_good:
                draft.change(TrialChange(trial_id=trial.id, state=ending.stopping_state))
        elif ending.is_for_good:
            self._close(draft, trial, next_state_without_run(ending))

    def _end_all(self, draft: ChangesetBuilder, ending: StopReason) -> None:
        if ending.is_for_good:
            draft.change_experiment(state=ending.stopping_state)
        for trial in self._trials:
            self._ask_to_end(draft, trial, ending)

    def _conclude(self, draft: ChangesetBuilder) -> None:
        """End the experiment when nothing of it is left to do."""
        if self._end is None and self._searching.has_ended and not self._trials:
            self._end = self._end_of_all()
        if self._end is None and self._ending is not None and not draft.created:
            is_over = not self._trials if self._ending.is_for_good else not self._trials.running()
            self._end = _FINAL[self._ending] if is_over else None
        if self._end is None:
            return
        if self._end is RunState.PAUSED:
            for trial in self._trials:
                draft.change(TrialChange(trial_id=trial.id, state=RunState.PAUSED))
        progress = 1.0 if self._end is RunState.COMPLETED else None
        draft.change_experiment(state=self._end, progress=progress, wanted_slots=0)
        logger.info("the experiment is %s", self._end.value)

    def _end_of_all(self) -> RunState:
        """Return how an experiment ends whose search had ended before, and of which trials were continued."""
        ends = {entry.id: entry.state for entry in self._ledger.trials()} | self._ends
        return next(iter(ends.values())) if len(set(ends.values())) == 1 else RunState.COMPLETED

    # Slots

    def _schedule(self, draft: ChangesetBuilder) -> list[RunSpec]:
        """Return the runs to start, and ask trials to make room for other experiments."""
        waiting = self._trials.waiting() if self._ending is None else []
        running, unit = self._trials.running(), self._config.resources.slots_per_trial
        limit = self._allocator.capacity if self._control.max_slots is None else self._control.max_slots
        wanted = min((len(waiting) + len(running)) * unit, limit)
        if wanted != self._wanted:
            draft.change_experiment(wanted_slots=wanted)
            self._wanted = wanted
        if not waiting and time.monotonic() - self._shared_at < _SHARE_EVERY:
            return []
        self._shared_at = time.monotonic()
        room = self._allocator.allowance(wanted, self._control.priority) // unit - len(running)
        for trial in running[len(running) + min(room, 0) :]:
            self._ask_to_end(draft, trial, StopReason.YIELD)
        return self._started(draft, [trial for trial in waiting[: max(room, 0)] if self._runs.is_ready(trial)])

    def _started(self, draft: ChangesetBuilder, trials: list[OpenTrial]) -> list[RunSpec]:
        specs = []
        for trial in trials:
            if (placement := self._stored(functools.partial(self._allocator.take, trial.id))) is None:
                break
            trial.run_id += 1
            trial.is_running = True
            spec, steps = self._runs.next_run(trial, placement)
            specs.append(spec)
            draft.change(
                TrialChange(trial_id=trial.id, state=RunState.ACTIVE, run_id=trial.run_id, started_from_step=steps)
            )
            logger.info("trial %d: run %d starts at step %d on %s", trial.id, trial.run_id, steps, dict(placement))
        return specs

    def _note_handles(self, draft: ChangesetBuilder) -> None:
        """Put on record how later runners find the runs, and let the runs hold their slots."""
        for trial in self._trials.running():
            if not trial.is_on_record and (handle := self._executor.handle(trial.id)) is not None:
                trial.is_on_record = True
                draft.change(TrialChange(trial_id=trial.id, handle=handle))
                self._stored(functools.partial(self._allocator.attach, trial.id, handle))

    def _look_at_progress(self, draft: ChangesetBuilder) -> None:
        began = time.monotonic()
        if began < self._progress_at or self._end is not None:
            return
        fractions = {
            entry.request_id: entry.progress or 0.0 for entry in self._ledger.trials() if not entry.state.is_final
        }
        progress = round(self._searching.progress(fractions), 4)
        if progress != self._progress:
            self._progress = progress
            draft.change_experiment(progress=progress)
        took = time.monotonic() - began
        self._progress_at = began + max(_PROGRESS_EVERY, took * _PROGRESS_SHARE)

    # What an earlier runner left

    def _recover(self) -> None:
        """Know the trials on record, and take over the runs whose ends nobody has taken in yet."""
        for entry in self._ledger.trials():
            if entry.state.is_final:
                continue
            trial = OpenTrial(entry.id, entry.request_id, entry.hparams, entry.seed, entry.run_id, entry.restarts)
            self._trials.add(trial)
            if entry.run_id and (run := self._ledger.runs(entry.id)[-1]).ended is None:
                trial.is_running = trial.is_on_record = trial.is_adopted = True
                trial.ending = StopReason.of_state(entry.state)
                self._executor.adopt(self._runs.spec(trial, {}), run.handle)
