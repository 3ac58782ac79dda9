"""Search methods that learn from earlier trials where good hyperparameters are, with Optuna."""

from __future__ import annotations

import abc
import contextlib
import importlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from determined import errors
from determined.experiment.config import Categorical, Const, Double, Hyperparameter, Int, Log, Space
from determined.experiment.config._hyperparameters import leaves
from determined.experiment.config._searcher import MaxConcurrentTrials, MaxTrials, Searcher, register
from determined.experiment.config._section import Natural, key
from determined.experiment.search._draws import filled
from determined.experiment.search._method import SearchMethod, Setup
from determined.experiment.search._protocol import ExitReason
from determined.experiment.search._trials import Trial

if TYPE_CHECKING:
    import optuna


class _ModelSearcher(Searcher):
    """What searchers have in common that model where good hyperparameters are."""

    max_trials: MaxTrials
    max_concurrent_trials: MaxConcurrentTrials = 16
    n_startup_trials: Annotated[Natural, key("Number of random trials before the model chooses.", 20)] = 10


@register
class TpeSearcher(_ModelSearcher):
    """Trials near earlier good ones, by a tree-structured Parzen estimator (Optuna)."""

    name: Literal["tpe"] = "tpe"

    def build(self, setup: Setup) -> SearchMethod:
        """Return the search method."""
        return Tpe(setup, self)


@register
class GpSearcher(_ModelSearcher):
    """Trials near earlier good ones, by a Gaussian process (Optuna); for few, costly trials."""

    name: Literal["gp"] = "gp"

    def build(self, setup: Setup) -> SearchMethod:
        """Return the search method."""
        return Gp(setup, self)


_FAILED = "failed"  # the result of a trial without a value to learn from


class Model(SearchMethod):
    """`max_trials` trials, each where the model of the earlier ones expects the most.

    The choice for a trial follows from the experiment's seed, the number of the trial, and the trials before it, so the
    list of those is all there is to save. The model knows the running trials and avoids choosing near them.
    """

    _libraries: tuple[str, ...] = ("optuna",)

    def __init__(self, setup: Setup, searcher: _ModelSearcher) -> None:
        super().__init__(setup)
        self._searcher = searcher
        self._seed = setup.seed
        _require(f"searcher.name={searcher.name!r}", *self._libraries)
        self._distributions = _distributions(setup.space)
        self._study = _study(searcher.smaller_is_better)
        self._asked: list[list[Any]] = []  # [chosen values, None (running), "failed" or the metric]

    @abc.abstractmethod
    def sampler(self, seed: int, startup: int) -> optuna.samplers.BaseSampler:
        """Return what chooses the hyperparameters of one trial, at random until `startup` trials have ended."""

    def suggest(self) -> dict[str, Any] | None:
        """Return the hyperparameters that promise the most, until there are enough trials."""
        if self.trials.created >= self.total():
            return None
        # A new one each time: a restart would lose what a sampler keeps from one choice to the next.
        self._study.sampler = self.sampler(self._seed_of(self.trials.created), self._searcher.n_startup_trials)
        chosen = self._study.ask(self._distributions).params
        self._asked.append([chosen, None])
        values = [_value(leaf, chosen.get(str(index))) for index, (_, leaf) in enumerate(leaves(self.space))]
        return filled(self.space, values)

    def ended(self, trial: Trial, reason: ExitReason) -> None:
        """Teach the model the best metric of a trial that was completed."""
        usable = reason is ExitReason.COMPLETED and trial.best is not None and math.isfinite(trial.best)
        result = trial.best if usable else _FAILED
        self._asked[trial.number][1] = result
        self._tell(trial.number, result)

    def total(self) -> int:
        """Return the configured number, and one more for each trial that is replaced."""
        return self._searcher.max_trials + self.trials.invalid

    def state(self) -> list[Any]:
        """Return what was asked for, and what came of it."""
        return [list(row) for row in self._asked]

    def load_state(self, state: Any) -> None:
        """Rebuild the model from what was asked for, and what came of it."""
        import optuna

        for number, (chosen, result) in enumerate(state):
            self._asked.append([chosen, result])
            running = optuna.trial.TrialState.RUNNING
            self._study.add_trial(
                optuna.trial.create_trial(state=running, params=chosen, distributions=self._distributions)
            )
            if result is not None:
                self._tell(number, result)

    def _tell(self, number: int, result: Any) -> None:
        import optuna

        if result == _FAILED:
            self._study.tell(number, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(number, result)

    def _seed_of(self, number: int) -> int:
        return int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])


class Tpe(Model):
    """Trials where good ones are more likely than bad ones, judged by the densities of both."""

    def sampler(self, seed: int, startup: int) -> optuna.samplers.BaseSampler:
        """Return Optuna's sampler, which counts running trials as bad ones."""
        import optuna

        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, multivariate=True, constant_liar=True)


class Gp(Model):
    """Trials with the largest expected improvement, by a Gaussian process through the earlier ones."""

    _libraries = ("optuna", "scipy", "torch")

    def sampler(self, seed: int, startup: int) -> optuna.samplers.BaseSampler:
        """Return Optuna's sampler, which takes running trials into account."""
        import optuna

        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)


def _require(wanted: str, *modules: str) -> None:
    """Raise if an optional library is missing."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise errors.InvalidExperimentException(
                f"{wanted} needs {module}, which cannot be imported ({error}). Run: pip install 'resolute[search]'"
            ) from error


def _study(smaller_is_better: bool) -> optuna.Study:
    import optuna

    with _quiet():
        return optuna.create_study(direction="minimize" if smaller_is_better else "maximize")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna from announcing the study on the terminal."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)


def _distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    """Return what Optuna chooses from, by the index of each hyperparameter in the space."""
    made = ((str(index), _distribution(leaf)) for index, (_, leaf) in enumerate(leaves(space)))
    return {name: distribution for name, distribution in made if distribution is not None}


def _distribution(leaf: Hyperparameter) -> optuna.distributions.BaseDistribution | None:
    from optuna import distributions

    match leaf:
        case Const():
            return None
        case Int():
            return distributions.IntDistribution(leaf.minval, leaf.maxval)
        case Double() | Log():  # a log is chosen by its exponent
            return distributions.FloatDistribution(leaf.minval, leaf.maxval)
        case Categorical():  # by index, as the values may be anything
            return distributions.CategoricalDistribution(range(len(leaf.vals)))


def _value(leaf: Hyperparameter, chosen: Any) -> Any:
    """Return the hyperparameter that Optuna's choice stands for."""
    match leaf:
        case Const():
            return leaf.val
        case Categorical():
            return leaf.vals[chosen]
        case Log():
            return leaf.base**chosen
        case _:
            return chosen
