"""Optimizers that step in one fused kernel, if torch has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from determined.pytorch._optim.precision import parameters_of

_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def kept_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that choose the implementation of its step, not its result."""
    return {name: group[name] for name in ("fused", "foreach", "capturable") if name in group}


def fuse(optimizers: list[Optimizer], models: list[nn.Module]) -> str | None:
    """Let optimizers of CUDA parameters step fused, unless the program chose how they step; return which do."""
    if any(getattr(module, "sparse", False) for model in models for module in model.modules()):
        return None  # there is no fused step on sparse gradients
    fused = [optimizer for optimizer in optimizers if _is_free_to_fuse(optimizer)]
    for optimizer in fused:
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings["fused"] = True
        # As its constructor does: a gradient scaler then lets the kernel unscale gradients and skip steps.
        optimizer.__dict__["_step_supports_amp_scaling"] = True
        place_steps(optimizer)
    names = ", ".join(sorted({type(optimizer).__name__ for optimizer in fused}))
    switch = "optimizations: {fused_optimizer: false} switches it off"
    return f"{names} steps fused, in one kernel ({switch})." if fused else None


def _is_free_to_fuse(optimizer: Optimizer) -> bool:
    """Return whether torch has a fused step for an optimizer and the program did not choose an implementation."""
    if type(optimizer) not in _KINDS:
        return False
    undecided = all(
        group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
        for group in optimizer.param_groups
    )
    return undecided and all(p.is_cuda and p.is_floating_point() for p in parameters_of(optimizer))


def place_steps(optimizer: Optimizer) -> None:
    """Move an optimizer's step counters to the device of its parameters."""
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)
