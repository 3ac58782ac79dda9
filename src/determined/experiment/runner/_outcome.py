"""What becomes of a trial whose run has ended. Pure: the end goes in, the decision comes out."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection

from determined.experiment.executors import EndReason, RunExit
from determined.experiment.search import ExitReason
from determined.tracking import RunState


class StopReason(enum.IntEnum):
    """Why a trial was asked to end, the weakest reason first: a stronger one takes its place."""

    YIELD = 1
    """Its slots are for another experiment: it goes on later."""
    PAUSE = 2
    """The experiment is paused: it goes on later."""
    SEARCH = 3
    """The search has seen enough of it."""
    ERROR = 4
    """The experiment cannot go on."""
    CANCEL = 5
    """People do not want it any more."""
    KILL = 6
    """People want it to end at once."""

    @property
    def is_for_good(self) -> bool:
        """Whether the trial does not go on later."""
        return self > StopReason.PAUSE

    @property
    def stopping_state(self) -> RunState:
        """The state of a trial that is ending for this reason."""
        return _STOPPING.get(self, RunState.ACTIVE)

    @classmethod
    def of_state(cls, state: RunState) -> StopReason | None:
        """Return why a trial in this state is ending; None if it is not."""
        return next((ending for ending, stopping in _STOPPING.items() if stopping is state), None)


_STOPPING = {
    StopReason.SEARCH: RunState.STOPPING_COMPLETED,
    StopReason.ERROR: RunState.STOPPING_ERROR,
    StopReason.CANCEL: RunState.STOPPING_CANCELED,
    StopReason.KILL: RunState.STOPPING_KILLED,
}


@dataclasses.dataclass(frozen=True, slots=True)
class TrialOutcome:
    """How a trial goes on: with another run if there is no state to end in."""

    state: RunState | None = None
    exit: ExitReason | None = None
    reason: str | None = None
    counts: bool = False
    """Whether the run counts as a failure of the trial."""


AGAIN = TrialOutcome()


def next_state(
    ended: RunExit, ending: StopReason | None, restarts: int, max_restarts: int, fatal_patterns: Collection[str]
) -> TrialOutcome:
    """Return what follows from the end of a run that was asked to end, or was not."""
    if ended.reason is EndReason.INVALID_HP:
        return TrialOutcome(
            RunState.ERROR, ExitReason.INVALID_HP, f"invalid hyperparameters: {ended.message}", counts=True
        )
    if ended.reason is EndReason.COMPLETED:
        return TrialOutcome(RunState.COMPLETED, ExitReason.COMPLETED)
    if ending is not None and ending.is_for_good:
        return next_state_without_run(ending)
    if ended.reason is EndReason.STOPPED and (ending is not None or ended.runner_gone):
        return AGAIN
    return _fate_of_failure(ended, restarts, max_restarts, fatal_patterns)


def next_state_without_run(ending: StopReason) -> TrialOutcome:
    """Return what becomes of a trial that ends for good while it does not run, or runs no longer."""
    if ending is StopReason.SEARCH:
        return TrialOutcome(RunState.COMPLETED, ExitReason.COMPLETED)
    if ending is StopReason.ERROR:
        return TrialOutcome(RunState.ERROR, ExitReason.ERROR, "the experiment could not go on")
    return TrialOutcome(RunState.CANCELED, ExitReason.CANCELED, "canceled" if ending is StopReason.CANCEL else "killed")


def _fate_of_failure(ended: RunExit, restarts: int, max_restarts: int, fatal_patterns: Collection[str]) -> TrialOutcome:
    why = ended.message or ended.reason.value.lower()
    if ended.reason is EndReason.NOT_STARTED:
        return TrialOutcome(RunState.ERROR, ExitReason.ERROR, why, counts=True)
    if found := [pattern for pattern in ended.matches if pattern in fatal_patterns]:
        reason = f"{why} (no further try: a log policy says so for {found[0]!r})"
        return TrialOutcome(RunState.ERROR, ExitReason.ERROR, reason, counts=True)
    if restarts >= max_restarts:
        return TrialOutcome(RunState.ERROR, ExitReason.ERROR, f"{why} (after {restarts} restarts)", counts=True)
    return TrialOutcome(reason=why, counts=True)
