"""Trials drawn at random, each independently of the others."""

from __future__ import annotations

from typing import Any, Literal

from determined.experiment.config._searcher import MaxConcurrentTrials, MaxTrials, Searcher, register
from determined.experiment.search._method import SearchMethod, Setup


@register
class RandomSearcher(Searcher):
    """`max_trials` trials with hyperparameters drawn at random."""

    name: Literal["random"] = "random"
    max_trials: MaxTrials
    max_concurrent_trials: MaxConcurrentTrials = 16

    def build(self, setup: Setup) -> SearchMethod:
        """Return the search method."""
        return Random(setup, self)


class Random(SearchMethod):
    """`max_trials` random trials; those that raise InvalidHP are replaced."""

    def __init__(self, setup: Setup, searcher: RandomSearcher) -> None:
        super().__init__(setup)
        self._max_trials = searcher.max_trials

    def suggest(self) -> dict[str, Any] | None:
        """Return hyperparameters drawn at random until there are enough trials."""
        return self.sample() if self.trials.created < self.total() else None

    def total(self) -> int:
        """Return the configured number, and one more for each trial that is replaced."""
        return self._max_trials + self.trials.invalid
