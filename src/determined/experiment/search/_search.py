"""A search: a method, its generator and its trials, driven by events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Self

from determined import errors
from determined.experiment.config import Searcher, Space
from determined.experiment.search._method import Folder, Rung, SearchMethod, Setup
from determined.experiment.search._protocol import Began, Event, Exited, Operation, Shutdown, Validated


class Search:
    """Decides which trials to run, from nothing but the events it gets and the experiment's seed.

    The same searcher, space, seed and events give the same operations, in any process. A custom method is imported from
    `folder`.
    """

    def __init__(self, searcher: Searcher, space: Space, seed: int, folder: Folder = ".") -> None:
        self._searcher = searcher
        setup = Setup.of(searcher, space, seed, folder)
        self._draws, self._trials = setup.draws, setup.trials
        self._method: SearchMethod = searcher.build(setup)
        self._began = self._ended = False

    def handle(self, event: Event) -> list[Operation]:
        """Return the operations to perform now, in order. Events after the end of a trial change nothing."""
        operations = list(self._follow(event))
        if self._began and not self._ended and len(self._trials) == 0:
            self._ended = True
            operations.append(self._shutdown())
        return operations

    @property
    def has_ended(self) -> bool:
        """Whether all requested trials have ended, and no more will be requested."""
        return self._ended

    def progress(self, fractions: Mapping[str, float]) -> float:
        """Return the finished fraction of the search, from 0 to 1.

        `fractions` has the finished fraction of each running trial, by request id.
        """
        return 1.0 if self._ended else self._method.progress(fractions)

    def rungs(self) -> tuple[Rung, ...]:
        """Return the rungs with their trials, bracket by bracket from the lowest rung up; empty without rungs."""
        return self._method.rungs()

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs, as JSON."""
        return {
            "searcher": self._searcher.name,
            "began": self._began,
            "ended": self._ended,
            "draws": self._draws.state(),
            "trials": self._trials.state(),
            "method": _checked_state(self._method),
        }

    @classmethod
    def restore(
        cls, searcher: Searcher, space: Space, seed: int, state: Mapping[str, Any], folder: Folder = "."
    ) -> Self:
        """Return the search that had the state; it continues as the saved one would have."""
        if state["searcher"] != searcher.name:
            raise errors.InternalException(
                f"A search saved as {state['searcher']!r} cannot continue as {searcher.name!r}; restore it "
                "with the config it began with."
            )
        search = cls(searcher, space, seed, folder)
        search._began, search._ended = state["began"], state["ended"]
        search._draws.load_state(state["draws"])
        search._trials.load_state(state["trials"])
        search._method.load_state(state["method"])
        return search

    def _follow(self, event: Event) -> Iterable[Operation]:
        match event:
            case Began():
                return self._begin()
            case Validated():
                reporting = self._trials.validated(event)
                return self._method.validated(reporting) if reporting else ()
            case Exited():
                ended = self._trials.close(event.request_id, event.reason)
                return self._method.exited(ended, event.reason) if ended else ()
            case _:
                raise TypeError(f"handle({event!r}): pass a Began, Validated or Exited.")

    def _begin(self) -> list[Operation]:
        if self._began:
            raise errors.InternalException("A search begins once; pass Began() to a new Search only.")
        operations = list(self._method.begin())
        if not operations:
            name = type(self._method).__name__
            raise errors.InvalidExperimentException(
                f"{name}.suggest() returned None before there was any trial; return the hyperparameters of a first one."
            )
        self._began = True
        return operations

    def _shutdown(self) -> Shutdown:
        trials = self._trials
        return Shutdown(failed=trials.failed == trials.created, canceled=trials.canceled == trials.created)


def _checked_state(method: SearchMethod) -> Any:
    """Return the state of a method, which may be a user's, if it is what JSON gives back."""
    state = method.state()
    name = f"{type(method).__name__}.state()"
    try:
        read = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise errors.InvalidExperimentException(
            f"{name} returned {state!r}, which is not JSON ({error}); return finite numbers, strings, lists and "
            "mappings."
        ) from error
    if read != state:
        raise errors.InvalidExperimentException(
            f"{name} returned {state!r}, which JSON turns into {read!r}; use lists, not tuples, and strings as keys."
        )
    return state
