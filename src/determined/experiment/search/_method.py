"""What every search method is, those of users included."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from determined.experiment.config import Searcher, Space
from determined.experiment.search._draws import Draws
from determined.experiment.search._protocol import ExitReason, Operation
from determined.experiment.search._trials import Trial, Trials

Folder = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What a search method is made from. A custom method is imported from `folder`."""

    searcher: Searcher
    space: Space
    seed: int
    draws: Draws
    trials: Trials
    folder: Folder

    @classmethod
    def of(cls, searcher: Searcher, space: Space, seed: int, folder: Folder) -> Self:
        """Return the setup of a search that has not begun."""
        draws = Draws(seed)
        return cls(searcher, space, seed, draws, Trials(draws, searcher.smaller_is_better), folder)


@dataclasses.dataclass(frozen=True, slots=True)
class Rung:
    """One rung of a bracket: how much training it takes, how many trials have arrived, and which are on their way."""

    bracket: int
    number: int
    time: int
    arrived: int
    climbing: tuple[str, ...]
    """Request ids of the running trials, not asked to stop, that have reached all rungs below this one only."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreviewRow:
    """Trials that reach a rung: of those that `arrive`, some `go_on` and the rest `end` after training for `time`.

    Searches without rungs have one row, with neither bracket nor rung. `arrive` and `end` are None if the number of
    trials is open; `time` is None if the program decides how long it trains.
    """

    bracket: int | None
    rung: int | None
    arrive: int | None
    go_on: int
    end: int | None
    time: int | None


class SearchMethod(abc.ABC):
    """Which hyperparameters are tried next, and which trials end early.

    A method of your own overrides `suggest`, and more as needed:

    - `suggest` returns the hyperparameters of another trial,
    - `stops` returns after a validation whether that trial should end,
    - `ended` receives each trial that ended, and the reason,
    - `total` returns how many trials there will be, for the progress display,
    - `state` and `load_state` carry what the method remembers over a restart.

    The search keeps `max_concurrent_trials` trials going, and the experiment ends when `suggest` returns None and no
    trial is left. A method may use:

    - `self.options`: the mapping `searcher.options` of the config,
    - `self.space`: the section `hyperparameters`; `self.sample()` draws from it,
    - `self.random`: the experiment's generator (`numpy.random.RandomState`), whose position is saved with the state,
    - `self.trials`: the running trials (iterate over it), and the counts `created`, `closed`, `failed`, `canceled`
      and `invalid`,
    - `self.smaller_is_better`.

    A method must be deterministic: its decisions follow from the calls it gets and from `self.random`. Then a search
    that is interrupted anywhere continues as if it had not been.
    """

    def __init__(self, setup: Setup) -> None:
        self.space = setup.space
        self.trials = setup.trials
        self.random: np.random.RandomState = setup.draws.random
        self.smaller_is_better: bool = setup.searcher.smaller_is_better
        self.options: dict[str, Any] = getattr(setup.searcher, "options", {})
        self._limit: int = getattr(setup.searcher, "max_concurrent_trials", 0)
        self._draws = setup.draws

    @abc.abstractmethod
    def suggest(self) -> dict[str, Any] | None:
        """Return the hyperparameters of another trial, or None for no further trial now.

        Called at the start, and whenever a trial ends or is stopped, until it returns None or enough trials are
        running. `self.trials.created` is the number of the requested trial, from 0 on.
        """

    def stops(self, trial: Trial) -> bool:
        """Return whether to end the trial now; called after each of its validations."""
        return False

    def ended(self, trial: Trial, reason: ExitReason) -> None:  # noqa: B027  # a hook
        """Take note of a trial that ended, with its `best` and `last` metric."""

    def total(self) -> int | None:
        """Return how many trials there will be in all, including those that gave up; None if that is open."""
        return None

    def state(self) -> Any:
        """Return what the method remembers, as JSON (mappings with string keys, lists, numbers, strings)."""
        return None

    def load_state(self, state: Any) -> None:  # noqa: B027  # a hook
        """Remember what `state` returned in an earlier process; called before anything else."""

    def sample(self) -> dict[str, Any]:
        """Return hyperparameters drawn at random from the space."""
        return self._draws.hparams(self.space)

    def begin(self) -> Iterator[Operation]:
        """Yield the operations with which the search starts: as many trials as may run at once."""
        yield from self._fill()

    def validated(self, trial: Trial) -> Iterator[Operation]:
        """Yield the operations that follow from a validation: the end of the trial, if it `stops`, and others."""
        if self.stops(trial):
            yield self.trials.stop(trial)
            yield from self._fill()

    def exited(self, trial: Trial, reason: ExitReason) -> Iterator[Operation]:
        """Yield the operations that follow from the end of a trial: others in its place."""
        self.ended(trial, reason)
        yield from self._fill()

    def progress(self, fractions: Mapping[str, float]) -> float:
        """Return the finished fraction of the search, from 0 to 1: the mean over its trials.

        `fractions` has the finished fraction of each running trial, by request id.
        """
        done = self.trials.closed + sum(_clamped(fractions.get(trial.request_id, 0.0)) for trial in self.trials)
        return min(done / max(self.total() or 0, self.trials.created, 1), 1.0)

    def rungs(self) -> tuple[Rung, ...]:
        """Return the rungs with their trials, bracket by bracket from the lowest rung up; empty without rungs."""
        return ()

    def planned_rungs(self) -> tuple[PreviewRow, ...]:
        """Return how many trials would reach each rung if none failed, for the preview; empty without rungs."""
        return ()

    def _fill(self) -> Iterator[Operation]:
        while not self._limit or self.trials.running < self._limit:
            hparams = self.suggest()
            if hparams is None:
                return
            yield self.trials.create(hparams)


def _clamped(fraction: float) -> float:
    return min(max(fraction, 0.0), 1.0) if fraction == fraction else 0.0
