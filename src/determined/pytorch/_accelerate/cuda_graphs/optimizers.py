"""Optimizers whose steps can be captured in a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from determined.pytorch._optim.fused import place_steps


class CapturableOptimizers:
    """Makes optimizers capturable during a batch, with learning rates as tensors if possible.

    Outside of a batch, all settings are the plain numbers that the program and its schedulers read and write and that
    checkpoints save.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        # Without a fused step torch would read a tensor's value, and wait for it.
        self._rates = [_Rate(g) for g in self._groups if g.get("fused") and not isinstance(g["lr"], torch.Tensor)]
        with_rate = {id(rate.group) for rate in self._rates}
        self._constants = [
            (group, key)
            for group in self._groups
            for key in group
            if key != "params" and not (key == "lr" and id(group) in with_rate)
        ]
        for optimizer in self._optimizers:
            if "capturable" in optimizer.defaults:
                place_steps(optimizer)
                optimizer.__dict__["_warned_capturable_if_run_uncaptured"] = True  # torch warns of eager batches

    def refusal(self) -> str | None:
        """Return why steps cannot be captured; None if they can."""
        for optimizer in self._optimizers:
            is_fused_sgd = isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0].get("fused")
            if "capturable" not in optimizer.defaults and not is_fused_sgd:
                return f"{type(optimizer).__name__} is not an optimizer whose steps torch can capture"
        return None

    def update(self) -> None:
        """Copy the learning rates that the program and its schedulers have set into the tensors."""
        for rate in self._rates:
            rate.update()

    def settings(self) -> tuple[Any, ...]:
        """Return the settings that a captured step holds as constants: a change invalidates the graph."""
        return tuple([group[key] for group, key in self._constants])

    def changed_setting(self, before: tuple[Any, ...]) -> str | None:
        """Return the name of the first setting that differs from `before`, which may hold more values at its end."""
        pairs = zip(self._constants, before, strict=False)
        return next((key for (group, key), value in pairs if group[key] != value), None)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Make the optimizers capturable inside the block."""
        kept = [(group, group.get("capturable"), group["lr"]) for group in self._groups]
        for group in self._groups:
            if "capturable" in group:
                group["capturable"] = True
        for rate in self._rates:
            rate.group["lr"] = rate.tensor
        try:
            yield
        finally:
            for group, capturable, lr in kept:
                group["lr"] = lr
                if "capturable" in group:
                    group["capturable"] = capturable


class _Rate:
    """The learning rate of a parameter group, as a tensor that graphs read."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self._value = group["lr"]
        self.tensor = torch.tensor(float(self._value), dtype=torch.float32, device=group["params"][0].device)

    def update(self) -> None:
        value = self.group["lr"]
        if value != self._value:
            self.tensor.fill_(value)  # does not wait
            self._value = value
