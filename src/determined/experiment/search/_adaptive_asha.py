"""Several brackets of asynchronous successive halving, from those that stop early to those that wait."""

from __future__ import annotations

import math

from determined.experiment.config import AdaptiveAshaSearcher
from determined.experiment.search._bracket import BracketPlan


def adaptive_plans(searcher: AdaptiveAshaSearcher) -> list[BracketPlan]:
    """Return the brackets of the search, those with the most rungs first."""
    rungs = sorted(searcher.bracket_rungs or _rungs(searcher), reverse=True)
    trials = _trials(rungs, searcher)
    concurrency = _concurrency(trials, searcher)
    return [
        BracketPlan(its_rungs, its_trials, its_concurrency, searcher.divisor, searcher.max_time)
        for its_rungs, its_trials, its_concurrency in zip(rungs, trials, concurrency, strict=True)
    ]


def _rungs(searcher: AdaptiveAshaSearcher) -> range:
    most = min(
        searcher.max_rungs,
        math.floor(math.log(searcher.max_time) / math.log(searcher.divisor)) + 1,
        math.floor(math.log(searcher.max_trials) / math.log(searcher.divisor)) + 1,
    )
    fewest = {"conservative": 1, "standard": (most - 1) // 2 + 1, "aggressive": most}[searcher.mode]
    return range(fewest, most + 1)


def _trials(rungs: list[int], searcher: AdaptiveAshaSearcher) -> list[int]:
    """Share the trials so that every bracket spends about as much training as the others."""
    weights = [searcher.divisor ** (its - 1) / its for its in rungs]
    trials = [max(math.floor(searcher.max_trials * weight / sum(weights)), 1) for weight in weights]
    trials[0] += max(searcher.max_trials - sum(trials), 0)
    return trials


def _concurrency(trials: list[int], searcher: AdaptiveAshaSearcher) -> list[int]:
    if not searcher.max_concurrent_trials:
        return [max(trials[-1], math.floor(searcher.divisor))] * len(trials)
    each, over = divmod(max(searcher.max_concurrent_trials, len(trials)), len(trials))
    return [each + (index < over) for index in range(len(trials))]
