"""What a search would do, told before it runs."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any

from determined.experiment.config import AdaptiveAshaSearcher, AsyncHalvingSearcher, Searcher, Space
from determined.experiment.search._adaptive_asha import adaptive_plans
from determined.experiment.search._async_halving import halving_plans
from determined.experiment.search._bracket import BracketPlan
from determined.experiment.search._method import Setup
from determined.experiment.search._methods import make_method
from determined.experiment.search._operations import Create

# How many trials are shown with their hyperparameters.
_SHOWN = 5


@dataclasses.dataclass(frozen=True, slots=True)
class PreviewRow:
    """Trials that reach a rung: of those that `arrive`, some `go_on` and the rest `end` after training for `time`.

    Searches without rungs have one row, with neither bracket nor rung. `arrive` and `end` are None where the number of
    trials is open; `time` is None where the program decides how long it trains.
    """

    bracket: int | None
    rung: int | None
    arrive: int | None
    go_on: int
    end: int | None
    time: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """The trials of a search: how many, how long they train if none fails, and the hyperparameters of the first ones.

    `unit` is what `time` counts. Rungs fill as trials come and go, so a real search may let a few more go on.
    """

    searcher: str
    unit: str | None
    trials: int | None
    rows: tuple[PreviewRow, ...]
    first: tuple[dict[str, Any], ...]

    @property
    def training(self) -> int | None:
        """How much all trials train together; None if that is open."""
        total = 0
        for row in self.rows:
            if row.end is None or row.time is None:
                return None
            total += row.end * row.time
        return total

    @property
    def header(self) -> tuple[str, ...]:
        """The titles of the columns of `table`."""
        time = self.unit or "length"
        return ("bracket", "rung", "arrive", "go on", "end", time) if self._has_rungs else ("trials", time)

    def table(self) -> list[tuple[str, ...]]:
        """Return the rows as texts, to print under `header`."""
        if not self._has_rungs:
            return [(_text(row.arrive), _text(row.time)) for row in self.rows]
        return [tuple(_text(cell) for cell in dataclasses.astuple(row)) for row in self.rows]

    @property
    def _has_rungs(self) -> bool:
        return any(row.rung is not None for row in self.rows)


def preview(searcher: Searcher, space: Space, seed: int, folder: str | os.PathLike[str] = ".") -> Preview:
    """Return what a search of these would do; a custom method is imported from the folder."""
    method = make_method(Setup.of(searcher, space, seed), folder)
    begun = itertools.islice(method.begin(), _SHOWN)
    first = tuple(operation.hparams for operation in begun if isinstance(operation, Create))
    trials = method.total()
    if isinstance(searcher, AsyncHalvingSearcher | AdaptiveAshaSearcher):
        plans = halving_plans(searcher) if isinstance(searcher, AsyncHalvingSearcher) else adaptive_plans(searcher)
        rows = [row for bracket, plan in enumerate(plans) for row in _rungs(bracket, plan)]
        return Preview(searcher.name, searcher.time_metric, trials, tuple(rows), first)
    length = searcher.max_length
    row = PreviewRow(None, None, trials, 0, trials, length.count if length else None)
    return Preview(searcher.name, length.unit if length else None, trials, (row,), first)


def _rungs(bracket: int, plan: BracketPlan) -> Iterator[PreviewRow]:
    arrive = plan.trials
    for rung, time in enumerate(plan.units):
        go_on = plan.going_on(arrive) if rung < plan.rungs - 1 else 0
        yield PreviewRow(bracket, rung, arrive, go_on, arrive - go_on, time)
        arrive = go_on


def _text(cell: int | None) -> str:
    return "-" if cell is None else f"{cell:,}"
