"""One bracket of asynchronous successive halving (ASHA)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from determined import errors
from determined.experiment.config import AdaptiveAshaSearcher, AsyncHalvingSearcher
from determined.experiment.search._bracket import Bracket, BracketPlan, Rung
from determined.experiment.search._events import ExitReason
from determined.experiment.search._method import SearchMethod, Setup
from determined.experiment.search._operations import Operation
from determined.experiment.search._trials import Trial


def halving_plans(searcher: AsyncHalvingSearcher) -> list[BracketPlan]:
    """Return the one bracket of the search."""
    concurrency = searcher.max_concurrent_trials
    return [BracketPlan(searcher.num_rungs, searcher.max_trials, concurrency, searcher.divisor, searcher.max_time)]


class Halving(SearchMethod):
    """Random trials in brackets, each of which lets the best go on and stops the others."""

    def __init__(
        self, setup: Setup, searcher: AsyncHalvingSearcher | AdaptiveAshaSearcher, plans: Sequence[BracketPlan]
    ) -> None:
        super().__init__(setup)
        self._time_metric = searcher.time_metric
        self._planned = sum(plan.trials for plan in plans)
        self._brackets = [Bracket(plan, self) for plan in plans]

    def suggest(self) -> dict[str, Any]:
        """Return hyperparameters drawn at random."""
        return self.sample()

    def total(self) -> int:
        """Return the configured number, and one more for each trial that is replaced."""
        return self._planned + self.trials.invalid

    def begin(self) -> Iterator[Operation]:
        """Yield the first trials of each bracket."""
        for bracket in self._brackets:
            yield from bracket.begin()

    def validated(self, trial: Trial) -> Iterator[Operation]:
        """Yield a stop, and another trial, unless the trial is good enough for the rungs it has reached."""
        yield from self._bracket_of(trial).validated(trial, self._ascending(trial.last), self._checked(trial.time))

    def exited(self, trial: Trial, reason: ExitReason) -> Iterator[Operation]:
        """Yield another trial in the place of one that ended without being stopped."""
        yield from self._bracket_of(trial).exited(trial, reason)

    def progress(self, fractions: Mapping[str, float]) -> float:
        """Return how much of the search is done, from 0 to 1: the mean over its brackets."""
        return sum(bracket.progress() for bracket in self._brackets) / len(self._brackets)

    def rungs(self) -> tuple[Rung, ...]:
        """Return the rungs of all brackets."""
        return tuple(rung for number, bracket in enumerate(self._brackets) for rung in bracket.rungs(number))

    def state(self) -> list[Any]:
        """Return the brackets as JSON."""
        return [bracket.state() for bracket in self._brackets]

    def load_state(self, state: Any) -> None:
        """Become what `state` described."""
        for bracket, its in zip(self._brackets, state, strict=True):
            bracket.load_state(its)

    def _bracket_of(self, trial: Trial) -> Bracket:
        return next(bracket for bracket in self._brackets if trial.request_id in bracket)

    def _ascending(self, metric: float | None) -> float:
        if metric is None or math.isnan(metric):
            return math.inf
        return metric if self.smaller_is_better else -metric

    def _checked(self, time: float | None) -> float:
        if time is not None and math.isfinite(time):
            return time
        came = "no" if time is None else f"{time} as its"
        name = self._time_metric
        raise errors.InvalidExperimentException(
            f"A validation came with {came} metric {name!r}, which searcher.time_metric names: stopping trials early "
            f"takes a number that says how far each is. Report {name!r} with every validation, or set "
            "searcher.time_metric to a metric that is reported, such as batches or epochs."
        )
