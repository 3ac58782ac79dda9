"""What becomes of a trial whose run has ended. Pure: the exit goes in, the decision comes out."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection

from determined.experiment.executors import EndReason, RunExit
from determined.experiment.search import ExitReason
from determined.tracking import RunState


class StopReason(enum.IntEnum):
    """Why a trial was asked to stop, the weakest reason first: a stronger one replaces a weaker one."""

    YIELD = 1
    """Another experiment needs its slots: it goes on later."""
    PAUSE = 2
    """The experiment is paused: it goes on later."""
    SEARCH = 3
    """The search stopped it early."""
    ERROR = 4
    """The experiment cannot go on."""
    CANCEL = 5
    """A user canceled it; it saves a checkpoint."""
    KILL = 6
    """A user killed it."""

    @property
    def is_for_good(self) -> bool:
        """Whether the trial does not go on later."""
        return self > StopReason.PAUSE

    @property
    def stopping_state(self) -> RunState:
        """The state of a trial that is stopping for this reason."""
        return _STOPPING.get(self, RunState.ACTIVE)

    @classmethod
    def of_state(cls, state: RunState) -> StopReason | None:
        """Return why a trial in this state is stopping; None if it is not."""
        return next((reason for reason, stopping in _STOPPING.items() if stopping is state), None)


_STOPPING = {
    StopReason.SEARCH: RunState.STOPPING_COMPLETED,
    StopReason.ERROR: RunState.STOPPING_ERROR,
    StopReason.CANCEL: RunState.STOPPING_CANCELED,
    StopReason.KILL: RunState.STOPPING_KILLED,
}


@dataclasses.dataclass(frozen=True, slots=True)
class TrialOutcome:
    """How a trial goes on: with another run if there is no final state."""

    state: RunState | None = None
    exit: ExitReason | None = None
    reason: str | None = None
    is_failure: bool = False
    """Whether the run counts as a failure of the trial."""


def next_state(
    exit: RunExit, stop_reason: StopReason | None, restarts: int, max_restarts: int, fatal_patterns: Collection[str]
) -> TrialOutcome:
    """Return what follows from the exit of a run that was asked to stop, or was not (None)."""
    if exit.reason is EndReason.INVALID_HP:
        reason = f"invalid hyperparameters: {exit.message}"
        return TrialOutcome(RunState.ERROR, ExitReason.INVALID_HP, reason, is_failure=True)
    if exit.reason is EndReason.COMPLETED:
        return TrialOutcome(RunState.COMPLETED, ExitReason.COMPLETED)
    if stop_reason is not None and stop_reason.is_for_good:
        return next_state_without_run(stop_reason)
    if exit.reason is EndReason.INTERRUPTED:
        return TrialOutcome()
    if exit.reason is EndReason.STOPPED and (stop_reason is not None or exit.runner_gone):
        return TrialOutcome()
    return _after_failure(exit, restarts, max_restarts, fatal_patterns)


def next_state_without_run(stop_reason: StopReason) -> TrialOutcome:
    """Return what becomes of a trial that stops for good while it does not run, or no longer runs."""
    if stop_reason is StopReason.SEARCH:
        return TrialOutcome(RunState.COMPLETED, ExitReason.COMPLETED)
    if stop_reason is StopReason.ERROR:
        return TrialOutcome(RunState.ERROR, ExitReason.ERROR, "the experiment could not go on")
    reason = "canceled" if stop_reason is StopReason.CANCEL else "killed"
    return TrialOutcome(RunState.CANCELED, ExitReason.CANCELED, reason)


def _after_failure(exit: RunExit, restarts: int, max_restarts: int, fatal_patterns: Collection[str]) -> TrialOutcome:
    reason = exit.message or exit.reason.value.lower()
    fatal = next((pattern for pattern in exit.matches if pattern in fatal_patterns), None)
    if exit.reason is EndReason.NOT_STARTED:
        details = ""
    elif fatal is not None:
        details = f" (not restarted: a log policy forbids it after {fatal!r})"
    elif restarts >= max_restarts:
        details = f" (after {restarts} restarts)"
    else:
        return TrialOutcome(reason=reason, is_failure=True)
    return TrialOutcome(RunState.ERROR, ExitReason.ERROR, reason + details, is_failure=True)
