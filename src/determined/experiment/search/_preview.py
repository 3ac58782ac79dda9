"""What a search would do, shown before it runs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from determined.experiment.config import Searcher, Space
from determined.experiment.search._method import Folder, PreviewRow, Setup
from determined.experiment.search._protocol import Create

_SHOWN = 5  # trials, with their hyperparameters


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
        """Return the rows as strings, to print under `header`."""
        if not self._has_rungs:
            return [(_cell(row.arrive), _cell(row.time)) for row in self.rows]
        return [tuple(_cell(cell) for cell in dataclasses.astuple(row)) for row in self.rows]

    @property
    def _has_rungs(self) -> bool:
        return any(row.rung is not None for row in self.rows)


def preview(searcher: Searcher, space: Space, seed: int, folder: Folder = ".") -> Preview:
    """Return what a search of these would do; a custom method is imported from the folder."""
    method = searcher.build(Setup.of(searcher, space, seed, folder))
    begun = itertools.islice(method.begin(), _SHOWN)
    first = tuple(operation.hparams for operation in begun if isinstance(operation, Create))
    trials = method.total()
    unit, count = searcher.trial_length or (None, None)
    rows = method.planned_rungs() or (PreviewRow(None, None, trials, 0, trials, count),)
    return Preview(searcher.name, unit, trials, rows, first)


def _cell(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
