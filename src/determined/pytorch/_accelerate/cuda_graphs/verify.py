"""Train batches both with a graph and without, and compare the results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._optim import free_parameters

_CHECKED = {0, 1, 2, 50}
"""Which replays are compared."""
_RELATIVE, _ABSOLUTE = 1e-2, 1e-4
"""Tolerances for kernels that add in any order; most do not differ at all."""


class Verification:
    """Compares replays with batches that are trained without a graph, from the same state."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context
        self._numbers = itertools.count()

    def is_due(self) -> bool:
        """Count a replay, and return whether to compare it."""
        return next(self._numbers) in _CHECKED

    def run(self, eagerly: Callable[[], Any], replay: Callable[[], Any]) -> tuple[Any, str | None]:
        """Train one batch; return its metrics, and the name of the first value that differs, if any.

        Training continues from the result without a graph.
        """
        state, before, numbers = self._state(), self._copy(), torch.cuda.get_rng_state()
        metrics = eagerly()
        expected, numbers_after = self._copy(), torch.cuda.get_rng_state()
        _write(state, before)
        torch.cuda.set_rng_state(numbers)
        replayed = replay()
        difference = _difference(_named(metrics), _named(replayed)) or _difference(expected, self._state())
        _write(state, expected)
        torch.cuda.set_rng_state(numbers_after)
        return metrics, difference

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._state().items()}

    def _state(self) -> dict[str, Tensor]:
        context = self._context
        found: dict[str, Tensor] = {}
        for number, model in enumerate(context.models):
            for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
                found[f"{name} of model {number}"] = tensor
                if tensor.grad is not None:
                    found[f"the gradient of {name} of model {number}"] = tensor.grad
        for name, parameter in free_parameters.named(context).items():
            found[free_parameters.describe(name, parameter)] = parameter
            if parameter.grad is not None:
                found[f"the gradient of {free_parameters.describe(name, parameter)}"] = parameter.grad
        for number, optimizer in enumerate(context.optimizers):
            for index, entries in enumerate(optimizer.state.values()):
                for name, value in entries.items():
                    if isinstance(value, Tensor):
                        found[f"{name} of parameter {index} in optimizer {number}"] = value
        return found | {f"the loss scale ({n})": t for n, t in enumerate(context.precision.state_tensors())}


def _named(metrics: Any) -> dict[str, Tensor]:
    metrics = {"loss": metrics} if isinstance(metrics, Tensor) else metrics
    return {f"the metric {name!r}": value for name, value in metrics.items() if value is not None}


def _write(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            if name in source:
                tensor.copy_(source[name])


def _difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str | None:
    for name, value in expected.items():
        other = found.get(name)
        if other is None or not torch.allclose(value, other, _RELATIVE, _ABSOLUTE, equal_nan=True):
            return name
    return None
