"""Free parameters: parameters of wrapped optimizers that belong to no wrapped model, such as a temperature.

Checkpoints save them and ranks keep them equal, like the weights of models.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from determined import errors

if TYPE_CHECKING:
    from determined.pytorch._context import PyTorchTrialContext

STATE_KEY = "free_parameters"
_GRADIENT = "free."
"""Prefix of the names of gradients; names of model gradients begin with a number."""


def named(context: PyTorchTrialContext) -> dict[str, nn.Parameter]:
    """Return the free parameters of a trial by optimizer, group and position in the group, such as "0.1.3"."""
    known = {id(parameter) for model in context.models for parameter in model.parameters()}
    found: dict[str, nn.Parameter] = {}
    for number, optimizer in enumerate(context.optimizers):
        for index, group in enumerate(context.precision.groups_of(optimizer)):
            for position, parameter in enumerate(group):
                if id(parameter) not in known:
                    known.add(id(parameter))  # it may be in two optimizers
                    found[f"{number}.{index}.{position}"] = parameter
    return found


def check(context: PyTorchTrialContext) -> None:
    """Raise for free parameters that cannot be saved or that differ between ranks. All ranks must call this."""
    for optimizer in context.optimizers:
        context.backend.accept(optimizer)
    free = named(context)
    for name, parameter in free.items():
        if (fault := _fault(parameter)) is not None:
            raise errors.InvalidExperimentException(
                f"fit(): {describe(name, parameter)} belongs to no wrapped model and {fault}, so it can be neither "
                "saved nor averaged over ranks. Call context.wrap_model() on the module that it belongs to, or give "
                "the optimizer a parameter with values of its own."
            )
    if context.distributed.size > 1:
        per_rank = context.distributed.allgather([describe(*one) for one in free.items()])
        if any(one != per_rank[0] for one in per_rank):
            raise errors.InvalidExperimentException(
                f"The ranks have different parameters that belong to no wrapped model: {per_rank}. Build the "
                "same optimizers on every rank."
            )


def describe(name: str, parameter: Tensor) -> str:
    """Return a description of a free parameter: its position and shape."""
    number, group, position = name.split(".")
    return f"parameter {position} of group {group} of optimizer {number} (shape {tuple(parameter.shape)})"


def _fault(parameter: Tensor) -> str | None:
    if nn.parameter.is_lazy(parameter):
        return "has no values yet (it is lazy)"
    if parameter.is_meta:
        return "has no values (it is on the meta device)"
    if hasattr(parameter, "placements"):
        return "is a DTensor, which the program itself shards over ranks"
    return None


# In checkpoints


def state(context: PyTorchTrialContext) -> dict[str, Any]:
    """Return the entry of a checkpoint with the free parameters; an empty dict if there are none."""
    values = {name: parameter.detach() for name, parameter in named(context).items()}
    return {STATE_KEY: values} if values else {}


@torch.no_grad()
def restore(context: PyTorchTrialContext, checkpoint: Mapping[str, Any]) -> None:
    """Restore the free parameters; warn about those that the checkpoint does not hold."""
    saved, free = checkpoint.get(STATE_KEY), named(context)
    if not isinstance(saved, Mapping):
        saved = {}
    if missing := [describe(name, parameter) for name, parameter in free.items() if name not in saved]:
        warnings.warn(
            "The checkpoint does not hold these parameters, which belong to no wrapped model; they keep the values "
            f"that the program gave them: {'; '.join(missing)}.",
            stacklevel=2,
        )
    for name, parameter in free.items():
        value = saved.get(name, parameter)
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.40}"
            raise errors.InvalidCheckpointException(
                f"The checkpoint holds {shape} for {describe(name, parameter)}; load it with the program that saved it."
            )
        parameter.copy_(value)


def gradients(context: PyTorchTrialContext) -> dict[str, Tensor]:
    """Return the gradients of free parameters that exist, as between aggregated steps."""
    return {_GRADIENT + name: one.grad for name, one in named(context).items() if one.grad is not None}


def restore_gradients(context: PyTorchTrialContext, saved: Mapping[str, Tensor]) -> None:
    """Restore what `gradients` returned, and drop all other gradients of free parameters."""
    for name, parameter in named(context).items():
        gradient = saved.get(_GRADIENT + name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)


# Among ranks


def share(context: PyTorchTrialContext) -> dict[Optimizer, Callable[[], None]]:
    """Broadcast the chief's free parameters; return functions that average their gradients before an optimizer steps.

    Returns an empty dict for a process that trains alone. All ranks must call this.
    """
    free = named(context)
    ids = {id(parameter) for parameter in free.values()}
    average = context.backend.share(list(free.values())) if free else None
    if average is None:
        return {}
    exchanges: dict[Optimizer, Callable[[], None]] = {}
    for optimizer in context.optimizers:
        own = [one for group in context.precision.groups_of(optimizer) for one in group if id(one) in ids]
        if own:
            exchanges[optimizer] = functools.partial(average, own)
    return exchanges
