"""One trial."""

from __future__ import annotations

from typing import Any

from determined.experiment.search._method import SearchMethod


class Single(SearchMethod):
    """One trial, which is not replaced when it fails."""

    def suggest(self) -> dict[str, Any] | None:
        """Return hyperparameters drawn at random, once."""
        return None if self.trials.created else self.sample()

    def total(self) -> int:
        """Return one."""
        return 1
