"""Decide what the end of a run was."""

from __future__ import annotations

import dataclasses

from determined.experiment.executors._base import EndReason
from determined.launch._ends import RankExit


@dataclasses.dataclass(slots=True)
class RunObservations:
    """What has happened to a run, as far as its keeper knows."""

    not_started: str = ""
    """Why the entrypoint cannot be run."""
    killed: str = ""
    """Why the keeper killed it."""
    asked: bool = False
    """Whether it was asked to stop."""
    runner_gone: bool = False
    invalid_hp: str | None = None
    failure: RankExit | None = None
    status: int = 0
    words: str = ""
    """The last words of the rank that failed first."""


def classify_exit(course: RunObservations, ranks: int) -> tuple[EndReason, str]:
    """Return how a run ended, and that in one line."""
    if course.not_started:
        return EndReason.NOT_STARTED, course.not_started
    if course.killed:
        return EndReason.KILLED, course.killed
    if course.invalid_hp is not None:
        return EndReason.INVALID_HP, course.invalid_hp
    if course.failure is not None:
        who = f"rank {course.failure.rank}: " if ranks > 1 else ""
        return EndReason.FAILED, who + _how(course.failure, course.words)
    if course.asked:
        return EndReason.STOPPED, "its runner had ended" if course.runner_gone else ""
    if course.status:
        return EndReason.FAILED, f"it ended with exit code {course.status}, as if asked to stop by somebody else"
    return EndReason.COMPLETED, ""


def _how(failure: RankExit, words: str) -> str:
    # A signal says more than what the process wrote before.
    return words if words and failure.code > 0 else f"it {failure}"
