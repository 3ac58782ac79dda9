"""Trials drawn at random, each independently of the others."""

from __future__ import annotations

from typing import Any

from determined.experiment.config import RandomSearcher
from determined.experiment.search._method import SearchMethod, Setup


class Random(SearchMethod):
    """`max_trials` random trials; those with hyperparameters that make no sense are replaced."""

    def __init__(self, setup: Setup, searcher: RandomSearcher) -> None:
        super().__init__(setup)
        self._max_trials = searcher.max_trials

    def suggest(self) -> dict[str, Any] | None:
        """Return hyperparameters drawn at random until there are enough trials."""
        return self.sample() if self.trials.created < self.total() else None

    def total(self) -> int:
        """Return the configured number, and one more for each trial that is replaced."""
        return self._max_trials + self.trials.invalid
