"""The state of an experiment that is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from determined import tracking

if TYPE_CHECKING:
    from determined.experiment.executors import LogLine
    from determined.experiment.search import Rung


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """A trial, with the results of its validations."""

    id: int
    request_id: str
    state: tracking.RunState
    label: str
    """What it is doing, or how it ended."""
    progress: float | None
    hparams: Mapping[str, Any]
    """By name; those within others as `outer.inner`."""
    restarts: int
    reason: str | None
    steps: int = 0
    latest: float | None = None
    best: float | None = None
    next_rung: int | None = None
    """At which time it is compared with others next."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An experiment."""

    id: int
    name: str
    searcher: str
    metric: str
    smaller_is_better: bool
    time_metric: str | None
    state: tracking.RunState
    desired: tracking.Desired
    progress: float
    seconds: float
    """How long ago it began."""
    has_runner: bool
    trials: Sequence[TrialView]
    varying: Sequence[str]
    """The hyperparameters that are not the same in all trials."""
    best: tracking.Validation | None
    rungs: Sequence[Rung]
    own_slots: int
    other_slots: int
    news: Sequence[tracking.Validation]
    """Validations since the last view."""
    log: Sequence[tuple[int, LogLine]]
    """The last lines of the trials that run, with their trials."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen by itself."""
        return not self.has_runner

    @property
    def best_value(self) -> float | None:
        """The best value of the metric so far."""
        return None if self.best is None else float(self.best.metrics[self.metric])

    def trial(self, id: int) -> TrialView:
        """Return the trial with an id."""
        return next(trial for trial in self.trials if trial.id == id)

    def ranked(self) -> list[TrialView]:
        """Return the trials, the best first, those without a value last."""
        sign = 1 if self.smaller_is_better else -1
        return sorted(self.trials, key=lambda trial: (trial.best is None, sign * (trial.best or 0.0), trial.id))
