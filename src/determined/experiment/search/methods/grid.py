"""Every combination of values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Literal, TypeVar

from determined import errors
from determined.experiment.config import Categorical, Const, Double, Hyperparameter, Int, Log, Space
from determined.experiment.config._hyperparameters import leaves
from determined.experiment.config._searcher import MaxConcurrentTrials, Searcher, register
from determined.experiment.config._section import RuleViolation
from determined.experiment.search._draws import filled
from determined.experiment.search._method import SearchMethod, Setup

N = TypeVar("N", float, Fraction)
_MAX_POINTS = 1_000_000  # all of them become trials at once if max_concurrent_trials is 0


@register
class GridSearcher(Searcher):
    """One trial for every combination of values. Each int, double and log range needs a `count`."""

    name: Literal["grid"] = "grid"
    max_concurrent_trials: MaxConcurrentTrials = 16

    def build(self, setup: Setup) -> SearchMethod:
        """Return the search method."""
        return Grid(setup)

    def space_violations(self, space: Space) -> Iterator[RuleViolation]:
        """Yield the ranges without a count, and that there are too many points."""
        found = list(leaves(space))
        for path, leaf in found:
            if _lacks_count(leaf):
                yield RuleViolation((*path, "count"), "a grid search needs it", "Write count: 5.")
        if (points := math.prod(1 if _lacks_count(leaf) else _count(leaf) for _, leaf in found)) > _MAX_POINTS:
            yield RuleViolation(
                (),
                f"the grid has {points} points, more than {_MAX_POINTS}",
                "Choose smaller counts, or searcher.name: random.",
            )


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
        self._axes = [_Axis(leaf) for _, leaf in leaves(space)]
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


def _lacks_count(leaf: Hyperparameter) -> bool:
    return isinstance(leaf, Int | Double | Log) and leaf.count is None


def _count(leaf: Hyperparameter) -> int:
    match leaf:
        case Const():
            return 1
        case Categorical():
            return len(leaf.vals)
    if leaf.count is None:  # a search made in Python; a config is checked before
        raise errors.InvalidExperimentException(
            f"A grid search needs a count for every range; {leaf.type} from {leaf.minval} to {leaf.maxval} has none. "
            "Add count: 5 to it, or choose another searcher."
        )
    return min(leaf.count, leaf.maxval - leaf.minval + 1) if isinstance(leaf, Int) else leaf.count


def _between(low: N, high: N, index: int, count: int) -> N:
    """Return the value at one of `count` evenly spaced points; a single one is in the middle."""
    return low + (high - low) / 2 if count == 1 else low + index * (high - low) / (count - 1)


def _rounded(value: Fraction) -> int:
    """Return the nearest integer; of two, the one further from zero."""
    return int(math.copysign(1, value)) * math.floor(abs(value) + Fraction(1, 2))
