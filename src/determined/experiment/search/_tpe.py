"""Tree-structured Parzen estimators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from determined.experiment.search._model import Model

if TYPE_CHECKING:
    import optuna


class Tpe(Model):
    """Trials where good ones are more likely than bad ones, judged by the densities of both."""

    def sampler(self, seed: int, startup: int) -> optuna.samplers.BaseSampler:
        """Return Optuna's sampler, which counts trials under way as bad ones."""
        import optuna

        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, multivariate=True, constant_liar=True)
