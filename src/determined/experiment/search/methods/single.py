"""One trial."""

from __future__ import annotations

from typing import Any, Literal

from determined.experiment.config._searcher import Searcher, register
from determined.experiment.search._method import SearchMethod, Setup


@register
class SingleSearcher(Searcher):
    """One trial. A range among the hyperparameters is drawn from once."""

    name: Literal["single"] = "single"

    def build(self, setup: Setup) -> SearchMethod:
        """Return the search method."""
        return Single(setup)


class Single(SearchMethod):
    """One trial, which is not replaced when it fails."""

    def suggest(self) -> dict[str, Any] | None:
        """Return hyperparameters drawn at random, once."""
        return None if self.trials.created else self.sample()

    def total(self) -> int:
        """Return one."""
        return 1
