"""Every combination of values."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, TypeVar

from determined import errors
from determined.experiment.config import Categorical, Const, Double, Hyperparameter, Int, Log, Space
from determined.experiment.search._method import SearchMethod, Setup
from determined.experiment.search._space import filled, leaves

N = TypeVar("N", float, Fraction)


class Grid(SearchMethod):
    """One trial for each point of a grid, from the last point to the first."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._grid = Points(setup.space)

    def suggest(self) -> dict[str, Any] | None:
        """Return the next point; a trial that gives up has used its point."""
        left = self.total() - self.trials.created
        return self._grid[left - 1] if left else None

    def total(self) -> int:
        """Return the number of points."""
        return self._grid.count


class Points:
    """The points of a grid in order, the last axis fastest; computed when asked for, never all at once."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._axes = [_Axis(leaf) for leaf in leaves(space)]
        self.count: int = math.prod(axis.count for axis in self._axes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the hyperparameters of one point."""
        values = []
        for axis in reversed(self._axes):
            index, place = divmod(index, axis.count)
            values.append(axis[place])
        return filled(self._space, reversed(values))


class _Axis:
    """The values of one hyperparameter."""

    def __init__(self, leaf: Hyperparameter) -> None:
        self._leaf = leaf
        self.count: int = _count(leaf)

    def __getitem__(self, index: int) -> Any:
        leaf = self._leaf
        match leaf:
            case Const():
                return leaf.val
            case Categorical():
                return leaf.vals[index]
            case Int():
                return _rounded(_between(Fraction(leaf.minval), Fraction(leaf.maxval), index, self.count))
            case Double():
                return _between(leaf.minval, leaf.maxval, index, self.count)
            case Log():
                return leaf.base ** _between(leaf.minval, leaf.maxval, index, self.count)


def _count(leaf: Hyperparameter) -> int:
    match leaf:
        case Const():
            return 1
        case Categorical():
            return len(leaf.vals)
    if leaf.count is None:
        raise errors.InvalidExperimentException(
            f"A grid search needs a count for every range; {leaf.type} from {leaf.minval} to {leaf.maxval} has none. "
            "Add count: 5 to it, or choose another searcher."
        )
    return min(leaf.count, leaf.maxval - leaf.minval + 1) if isinstance(leaf, Int) else leaf.count


def _between(low: N, high: N, index: int, count: int) -> N:
    """Return the value at one of `count` evenly spaced places; the only one is in the middle."""
    return low + (high - low) / 2 if count == 1 else low + index * (high - low) / (count - 1)


def _rounded(value: Fraction) -> int:
    """Return the nearest whole number; of two, the one further from zero."""
    return int(math.copysign(1, value)) * math.floor(abs(value) + Fraction(1, 2))
