"""Walking through a search space: its hyperparameters in the order of their names, nested maps included."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from determined.experiment.config import Hyperparameter, Space


def leaves(space: Space) -> Iterator[Hyperparameter]:
    """Yield the hyperparameters, by sorted name, those of a nested map in its place."""
    for name in sorted(space):
        value = space[name]
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


def filled(space: Space, values: Iterable[Any]) -> dict[str, Any]:
    """Return the space with a value in the place of every hyperparameter; `values` come in the order of `leaves`."""
    return _filled(space, iter(values))


def _filled(space: Space, values: Iterator[Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in sorted(space):
        value = space[name]
        # A copy, as a constant may be a list, and no trial may change what the next one gets.
        made[name] = _filled(value, values) if isinstance(value, dict) else copy.deepcopy(next(values))
    return made
