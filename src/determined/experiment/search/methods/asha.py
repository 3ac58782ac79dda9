"""Asynchronous successive halving (ASHA), in one bracket or in several."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from determined import errors
from determined.experiment.config._searcher import MaxConcurrentTrials, MaxTrials, Searcher, register
from determined.experiment.config._section import LARGEST, Positive, RuleViolation, Text, ignored, is_finite_power, key
from determined.experiment.search._method import PreviewRow, Rung, SearchMethod, Setup
from determined.experiment.search._protocol import ExitReason, Operation
from determined.experiment.search._trials import Trial
from determined.experiment.search.methods._bracket import Bracket, BracketPlan

_Rungs = Annotated[int, Field(ge=1, le=100)]
_Divisor = Annotated[float, key("1/`divisor` of the trials go on from each rung.", 3, gt=1, le=LARGEST)]
_StopOnce = Annotated[Any, ignored("Whether a stopped trial stays stopped; here it always does.", True)]


class _RungSearcher(Searcher):
    """What searchers with rungs have in common."""

    stops_early: ClassVar[bool] = True

    max_trials: MaxTrials
    time_metric: Annotated[
        Text,
        key(
            "Validation metric that tells how long a trial has trained. A trial class reports `batches` "
            "and `epochs` automatically.",
            "epochs",
        ),
    ]
    max_time: Annotated[Positive, key("How long a trial trains that is never stopped, by `time_metric`.", 27)]

    def build(self, setup: Setup) -> SearchMethod:
        """Return the search method."""
        return Halving(setup, self)

    @abc.abstractmethod
    def brackets(self) -> list[BracketPlan]:
        """Return the brackets of the search."""

    @property
    def trial_length(self) -> tuple[str, int]:
        """The unit and the length of a trial that is never stopped."""
        return self.time_metric, self.max_time


@register
class AsyncHalvingSearcher(_RungSearcher):
    """Random trials of which only the best go on from rung to rung (ASHA); the others are stopped early."""

    name: Literal["async_halving"] = "async_halving"
    num_rungs: Annotated[_Rungs, key("Number of rungs, the last at `max_time`.", 4)]
    divisor: _Divisor = 4.0
    max_concurrent_trials: MaxConcurrentTrials = 16
    stop_once: _StopOnce = None

    def violations(self) -> Iterator[RuleViolation]:
        """Yield that the lowest rung is too low to compute."""
        yield from super().violations()
        if not is_finite_power(self.divisor, self.num_rungs - 1):
            yield RuleViolation(("num_rungs",), f"divisor={self.divisor} allows fewer rungs", "Write num_rungs: 4.")

    def brackets(self) -> list[BracketPlan]:
        """Return the one bracket of the search."""
        concurrency = self.max_concurrent_trials
        return [BracketPlan(self.num_rungs, self.max_trials, concurrency, self.divisor, self.max_time)]


@register
class AdaptiveAshaSearcher(_RungSearcher):
    """Several ASHA brackets with different numbers of rungs, for metrics that may show late which trials are good."""

    name: Literal["adaptive_asha"] = "adaptive_asha"
    mode: Annotated[
        Literal["standard", "conservative", "aggressive"],
        key(
            "How early trials are stopped: `aggressive` has one bracket, which stops earliest; "
            "`conservative` has brackets with every number of rungs.",
            "aggressive",
        ),
    ] = "standard"
    divisor: _Divisor = 4.0
    max_rungs: Annotated[_Rungs, key("Maximum number of rungs of a bracket.", 4)] = 5
    max_concurrent_trials: MaxConcurrentTrials = 16
    stop_once: _StopOnce = None
    bracket_rungs: Annotated[
        list[_Rungs], key("Number of rungs of each bracket, instead of those of `mode`.", [4, 3])
    ] = []

    def violations(self) -> Iterator[RuleViolation]:
        """Yield the brackets whose lowest rung is too low to compute."""
        yield from super().violations()
        for index, rungs in enumerate(self.bracket_rungs):
            if not is_finite_power(self.divisor, rungs - 1):
                yield RuleViolation(
                    ("bracket_rungs", index),
                    f"divisor={self.divisor} allows fewer rungs",
                    "Write bracket_rungs: [4, 3].",
                )

    def brackets(self) -> list[BracketPlan]:
        """Return the brackets of the search, those with the most rungs first."""
        rungs = sorted(self.bracket_rungs or self._rungs(), reverse=True)
        trials = self._trials(rungs)
        return [
            BracketPlan(its_rungs, its_trials, its_concurrency, self.divisor, self.max_time)
            for its_rungs, its_trials, its_concurrency in zip(rungs, trials, self._concurrency(trials), strict=True)
        ]

    def _rungs(self) -> range:
        most = min(
            self.max_rungs,
            math.floor(math.log(self.max_time) / math.log(self.divisor)) + 1,
            math.floor(math.log(self.max_trials) / math.log(self.divisor)) + 1,
        )
        fewest = {"conservative": 1, "standard": (most - 1) // 2 + 1, "aggressive": most}[self.mode]
        return range(fewest, most + 1)

    def _trials(self, rungs: list[int]) -> list[int]:
        """Share the trials so that every bracket trains for about the same time in all."""
        weights = [self.divisor ** (its - 1) / its for its in rungs]
        trials = [max(math.floor(self.max_trials * weight / sum(weights)), 1) for weight in weights]
        trials[0] += max(self.max_trials - sum(trials), 0)
        return trials

    def _concurrency(self, trials: list[int]) -> list[int]:
        if not self.max_concurrent_trials:
            return [max(trials[-1], math.floor(self.divisor))] * len(trials)
        each, over = divmod(max(self.max_concurrent_trials, len(trials)), len(trials))
        return [each + (index < over) for index in range(len(trials))]


class Halving(SearchMethod):
    """Random trials in brackets, each of which lets the best go on and stops the others."""

    def __init__(self, setup: Setup, searcher: _RungSearcher) -> None:
        super().__init__(setup)
        self._time_metric = searcher.time_metric
        self._plans = searcher.brackets()
        self._brackets = [Bracket(plan, self) for plan in self._plans]

    def suggest(self) -> dict[str, Any]:
        """Return hyperparameters drawn at random."""
        return self.sample()

    def total(self) -> int:
        """Return the configured number, and one more for each trial that is replaced."""
        return sum(plan.trials for plan in self._plans) + self.trials.invalid

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
        """Return the finished fraction of the search, from 0 to 1: the mean over its brackets."""
        return sum(bracket.progress() for bracket in self._brackets) / len(self._brackets)

    def rungs(self) -> tuple[Rung, ...]:
        """Return the rungs of all brackets."""
        return tuple(rung for number, bracket in enumerate(self._brackets) for rung in bracket.rungs(number))

    def planned_rungs(self) -> tuple[PreviewRow, ...]:
        """Return how many trials reach each rung of all brackets if none fails."""
        return tuple(row for number, plan in enumerate(self._plans) for row in plan.preview(number))

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
            f"needs a number that tells how long each has trained. Report {name!r} with every validation, or set "
            "searcher.time_metric to a metric that is reported, such as batches or epochs."
        )
