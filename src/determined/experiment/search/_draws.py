"""The one source of randomness of an experiment."""

from __future__ import annotations

import base64
import copy
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from determined.experiment.config import Categorical, Const, Double, Hyperparameter, Int, Log, Space
from determined.experiment.config._hyperparameters import leaves


class Draws:
    """Hyperparameters, request ids and trial seeds, drawn in a fixed order from one generator."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)

    def hparams(self, space: Space) -> dict[str, Any]:
        """Return a random choice for every hyperparameter, drawn in the order of their names."""
        return filled(space, (self._value(leaf) for _, leaf in leaves(space)))

    def request_id(self) -> str:
        """Return a new name for a trial, a random UUID."""
        return str(uuid.UUID(bytes=self.random.bytes(16), version=4))

    def trial_seed(self) -> int:
        """Return a seed for a trial."""
        return self._below(2**31)

    def state(self) -> dict[str, Any]:
        """Return the position in the sequence of numbers, as JSON."""
        _, key, position, has_gauss, gauss = self.random.get_state(legacy=True)
        packed = base64.b64encode(np.asarray(key, "<u4").tobytes()).decode()
        return {"key": packed, "position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state` returned."""
        key = np.frombuffer(base64.b64decode(state["key"]), "<u4")
        self.random.set_state(("MT19937", key, state["position"], state["has_gauss"], state["gauss"]))

    def _value(self, leaf: Hyperparameter) -> Any:
        match leaf:
            case Const(val=val):
                return val
            case Int(minval=minval, maxval=maxval):
                return minval + self._below(maxval - minval + 1)
            case Double(minval=low, maxval=high):
                return float(self.random.uniform(low, high))
            case Log(base=base, minval=low, maxval=high):
                return float(base ** self.random.uniform(low, high))
            case Categorical(vals=vals):
                return vals[self._below(len(vals))]

    def _below(self, end: int) -> int:
        # The width is NumPy's default on most platforms; explicit, so that all platforms draw the same numbers.
        return int(self.random.randint(0, end, dtype=np.int64))


def filled(space: Space, values: Iterable[Any]) -> dict[str, Any]:
    """Return the space with a value in place of every hyperparameter; `values` come in the order of `leaves`."""
    return _filled(space, iter(values))


def _filled(space: Space, values: Iterator[Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in sorted(space):
        value = space[name]
        # A copy, as a constant may be a list, and no trial may change what the next one gets.
        made[name] = _filled(value, values) if isinstance(value, dict) else copy.deepcopy(next(values))
    return made
