"""Gaussian processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from determined.experiment.config import GpSearcher
from determined.experiment.search._method import Setup
from determined.experiment.search._model import Model, require

if TYPE_CHECKING:
    import optuna


class Gp(Model):
    """Trials with the largest expected improvement, by a Gaussian process through the earlier ones."""

    def __init__(self, setup: Setup, searcher: GpSearcher) -> None:
        require(f"searcher.name={searcher.name!r}", "optuna", "scipy", "torch")
        super().__init__(setup, searcher)

    def sampler(self, seed: int, startup: int) -> optuna.samplers.BaseSampler:
        """Return Optuna's sampler, which takes trials under way into account."""
        import optuna

        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
