"""Search methods that learn from earlier trials where good hyperparameters lie, through Optuna."""

from __future__ import annotations

import abc
import contextlib
import importlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from determined import errors
from determined.experiment.config import Categorical, Const, Double, GpSearcher, Hyperparameter, Int, Log, TpeSearcher
from determined.experiment.search._events import ExitReason
from determined.experiment.search._method import SearchMethod, Setup
from determined.experiment.search._space import filled, leaves
from determined.experiment.search._trials import Trial

if TYPE_CHECKING:
    import optuna

# How a trial ended that has no value to learn from.
_FAILED = "failed"


class Model(SearchMethod):
    """`max_trials` trials, each where the model of the earlier ones expects the most.

    The choice for a trial follows from the experiment's seed, the number of the trial, and the trials before it, so the
    list of those is all there is to save. Trials under way are known to the model, which keeps away from them.
    """

    def __init__(self, setup: Setup, searcher: TpeSearcher | GpSearcher) -> None:
        super().__init__(setup)
        self._searcher = searcher
        self._seed = setup.seed
        require(f"searcher.name={searcher.name!r}", "optuna")
        self._distributions = _distributions(list(leaves(setup.space)))
        self._study = _study(searcher.smaller_is_better)
        self._asked: list[list[Any]] = []  # [chosen values, None (under way), "failed" or the metric]

    @abc.abstractmethod
    def sampler(self, seed: int, startup: int) -> optuna.samplers.BaseSampler:
        """Return what chooses the hyperparameters of one trial, at random until `startup` trials have ended."""

    def suggest(self) -> dict[str, Any] | None:
        """Return the hyperparameters that promise the most, until there are enough trials."""
        if self.trials.created >= self.total():
            return None
        # A new one each time: what a sampler keeps from one choice to the next would be lost in a restart.
        self._study.sampler = self.sampler(self._seed_of(self.trials.created), self._searcher.n_startup_trials)
        chosen = self._study.ask(self._distributions).params
        self._asked.append([chosen, None])
        values = [_value(leaf, chosen.get(str(index))) for index, leaf in enumerate(leaves(self.space))]
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
        """Build the model anew from what was asked for, and what came of it."""
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


def require(wanted: str, *modules: str) -> None:
    """Refuse to go on without libraries that not everybody installs."""
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


def _distributions(of: list[Hyperparameter]) -> dict[str, optuna.distributions.BaseDistribution]:
    """Return what Optuna chooses from, by the place of each hyperparameter in the space."""
    made = ((str(index), _distribution(leaf)) for index, leaf in enumerate(of))
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
        case Categorical():  # by its place, as the values may be anything
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
