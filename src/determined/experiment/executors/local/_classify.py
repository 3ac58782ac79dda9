"""Decide how a run ended."""

from __future__ import annotations

import dataclasses

from determined.experiment.executors._base import EndReason
from determined.processes import RankExit


@dataclasses.dataclass(slots=True)
class RunObservations:
    """What has happened to a run, as far as its shim knows."""

    not_started: str = ""
    """Why the entrypoint cannot be run."""
    killed: str = ""
    """Why the shim killed it."""
    asked: bool = False
    """Whether it was asked to stop."""
    runner_gone: bool = False
    invalid_hp: str | None = None
    failure: RankExit | None = None
    status: int = 0
    summary: str = ""
    """What the rank that failed first wrote last."""


def classify_exit(seen: RunObservations, *, names_rank: bool) -> tuple[EndReason, str]:
    """Return how a run ended, and why in one line."""
    if seen.not_started:
        return EndReason.NOT_STARTED, seen.not_started
    if seen.killed:
        return EndReason.KILLED, seen.killed
    if seen.invalid_hp is not None:
        return EndReason.INVALID_HP, seen.invalid_hp
    if seen.failure is not None:
        who = f"rank {seen.failure.rank}: " if names_rank else ""
        return EndReason.FAILED, who + _description(seen.failure, seen.summary)
    if seen.asked:
        return EndReason.STOPPED, "its runner had ended" if seen.runner_gone else ""
    if seen.status:
        return EndReason.FAILED, f"it ended with exit code {seen.status}, as if asked to stop by somebody else"
    return EndReason.COMPLETED, ""


def _description(failure: RankExit, summary: str) -> str:
    # A signal says more than what the process wrote before.
    return summary if summary and failure.code > 0 else f"it {failure}"
