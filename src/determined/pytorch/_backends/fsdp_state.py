"""The state of models and optimizers that FSDP spreads over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from determined import errors
from determined.pytorch._backends.shards import TakenShards, spread_tensors, whole_tensors
from determined.pytorch._backends.state_codec import (
    OWN,
    REPLICATED,
    UNREDUCED,
    Reference,
    Shards,
    named,
    references,
    with_tensors,
)
from determined.pytorch._optim.precision import parameters_of


class ShardedState:
    """State of which each rank has a part."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def shards(self) -> Shards | None:
        """Return where to put tensors that ranks share."""
        return TakenShards(self._mesh.get_rank())

    def attach(self, value: Any) -> Any:
        """Return nested values with tensors spread over the ranks in place of references; a rank's own are whole."""
        wanted = set(references(value))
        own = {one for one in wanted if one.placement == OWN}
        tensors = whole_tensors(own)
        if shared := wanted - own:
            tensors |= spread_tensors(shared, self._empty)
        return with_tensors(value, tensors) if wanted else value

    def fit_model(self, model: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return weights spread as those of the model are, also if they were saved whole."""
        own = model.state_dict()
        return {name: self._like(own.get(name), value) for name, value in weights.items()}

    def fit_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of each parameter spread as that is, also if it was saved whole."""
        parameters = dict(enumerate(parameters_of(optimizer)))
        per_parameter = {
            index: {name: self._like(parameters.get(index), value) for name, value in entries.items()}
            for index, entries in state["state"].items()
        }
        return {**state, "state": per_parameter}

    def gradients(self, models: Sequence[nn.Module]) -> dict[str, Tensor]:
        """Return gradients that are spread, and those of this rank that are still to be averaged over all."""
        reshard(models)
        found = {name: parameter.grad for name, parameter in named(models) if parameter.grad is not None}
        for name, parameter in _named_inner(models):
            if (gradient := _unreduced(parameter)) is not None:
                found[name + UNREDUCED] = gradient
        return found

    def restore_gradients(self, models: Sequence[nn.Module], saved: Mapping[str, Tensor], unreduced: bool) -> None:
        """Put saved gradients back, and drop all others."""
        reshard(models)
        inner = dict(_named_inner(models))
        for name, parameter in named(models):
            gradient, own = saved.get(name), saved.get(name + UNREDUCED)
            if own is None and unreduced and _is_whole(gradient):  # of a run with whole models
                gradient, own = None, gradient
            parameter.grad = None if gradient is None else self._like(parameter, gradient).to(parameter.device)
            if name in inner:
                _keep_unreduced(inner[name], None if own is None else own.to(self._mesh.device_type, copy=True))

    def _empty(self, reference: Reference, entry: Any) -> DTensor:
        place: Placement = Replicate() if reference.placement == REPLICATED else Shard(int(reference.placement))
        return empty_dtensor(
            *entry.size, dtype=entry.properties.dtype, device_mesh=self._mesh, placements=[place], requires_grad=False
        )

    def _like(self, template: Any, value: Any) -> Any:
        """Return a whole tensor spread as the one it is for; of another shape, as factors have, on every rank."""
        if not (isinstance(template, DTensor) and _is_whole(value)) or value.dim() == 0:
            return value
        placements = list(template.placements) if value.shape == template.shape else [Replicate()]
        return distribute_tensor(value.to(self._mesh.device_type), self._mesh, placements)


def reshard(models: Sequence[nn.Module]) -> None:
    """Let go of whole weights that the last forward pass has left."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _named_inner(models: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield what FSDP knows of each parameter; torch has no public way to gradients that are not averaged yet."""
    names = {id(parameter): name for name, parameter in named(models)}
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for inner in _inner_parameters(module):
                    yield names[id(inner.sharded_param)], inner


def _inner_parameters(module: FSDPModule) -> Iterator[Any]:
    try:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one, before torch 2.12
        for group in groups:
            yield from group.fsdp_params if group is not None else ()
    except AttributeError as error:
        raise errors.InternalException(
            f"torch {torch.__version__} keeps gradients between aggregated steps in another place than is known "
            f"({error}); use aggregation_frequency=1 with use_fsdp(), or another version of torch."
        ) from error


def _unreduced(inner: Any) -> Tensor | None:
    accumulated: Tensor | None = inner.unsharded_accumulated_grad
    if accumulated is None and hasattr(inner, "_unsharded_param"):
        accumulated = inner._unsharded_param.grad
    return accumulated


def _keep_unreduced(inner: Any, gradient: Tensor | None) -> None:
    inner.unsharded_accumulated_grad = gradient
    if hasattr(inner, "_unsharded_param"):
        inner._unsharded_param.grad = None
