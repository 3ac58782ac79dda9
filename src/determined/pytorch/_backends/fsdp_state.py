"""The state of models and optimizers that FSDP shards over ranks."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from determined import errors
from determined.pytorch._backends.base import UNREDUCED, StateCodec, named
from determined.pytorch._backends.shards import (
    INDEX_FILE,
    INDEX_FORMAT,
    OWN,
    REPLICATED,
    SHARDS_FOLDER,
    StoredTensor,
    mark_of,
)
from determined.pytorch._data.tree import map_plain
from determined.pytorch._optim.precision import parameters_of


class ShardedState(StateCodec):
    """State of which each rank has a part."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def shards(self) -> ShardWriter | None:
        return ShardWriter(self._mesh.get_rank())

    def fit_model(self, model: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return weights sharded like the model's, also if they were saved unsharded."""
        own = model.state_dict()
        return {name: self._like(own.get(name), value) for name, value in weights.items()}

    def fit_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state sharded like the parameters, also if it was saved unsharded."""
        parameters = dict(enumerate(parameters_of(optimizer)))
        per_parameter = {
            index: {name: self._like(parameters.get(index), value) for name, value in entries.items()}
            for index, entries in state["state"].items()
        }
        return {**state, "state": per_parameter}

    def gradients(self, models: Sequence[nn.Module]) -> dict[str, Tensor]:
        """Return the sharded gradients, and this rank's gradients that are still to be averaged over all."""
        inner = _fsdp_parameters(models)
        found = super().gradients(models)
        for name, parameter in inner.items():
            if (gradient := _unreduced(parameter)) is not None:
                found[name + UNREDUCED] = gradient
        return found

    def restore_gradients(self, models: Sequence[nn.Module], saved: Mapping[str, Tensor], unreduced: bool) -> None:
        inner = _fsdp_parameters(models)
        for name, parameter in named(models):
            gradient, own = saved.get(name), saved.get(name + UNREDUCED)
            if own is None and unreduced and _is_whole(gradient):  # of a run with whole models
                gradient, own = None, gradient
            parameter.grad = None if gradient is None else self._like(parameter, gradient).to(parameter.device)
            if name in inner:
                _set_unreduced(inner[name], None if own is None else own.to(self._mesh.device_type, copy=True))

    def _read(self, stored: StoredTensor) -> Tensor:
        """Return this rank's shard of a stored tensor as a DTensor; a plain tensor if it belonged to one rank."""
        if stored.placement == OWN:
            return stored.read()
        if stored.placement == REPLICATED:
            return self._distributed(stored.read(), stored.size, Replicate())
        dim = int(stored.placement)
        length = stored.size[dim]
        per_rank = math.ceil(length / self._mesh.size())  # as FSDP shards
        begin = min(self._mesh.get_local_rank() * per_rank, length)
        local = stored.read(dim, begin, min(begin + per_rank, length))
        return self._distributed(local, stored.size, Shard(dim))

    def _distributed(self, local: Tensor, size: tuple[int, ...], placement: Placement) -> DTensor:
        return DTensor.from_local(
            local.to(self._mesh.device_type),
            self._mesh,
            [placement],
            run_check=False,
            shape=torch.Size(size),
            stride=torch.empty(size, device="meta").stride(),
        )

    def _like(self, template: Any, value: Any) -> Any:
        """Return a tensor sharded like its template; one of another shape, such as a factor, is replicated."""
        if not (isinstance(template, DTensor) and _is_whole(value)) or value.dim() == 0:
            return value
        placements = list(template.placements) if value.shape == template.shape else [Replicate()]
        return distribute_tensor(value.to(self._mesh.device_type), self._mesh, placements)


class ShardWriter:
    """Tensors taken out of the state of a checkpoint, each written by the ranks that hold its shards."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tensors: dict[str, Tensor] = {}

    def take(self, value: Any, place: str) -> Any:
        """Return nested values with marks in place of DTensors, and keep the tensors."""
        if not isinstance(value, DTensor):
            return map_plain(lambda key, one: self.take(one, f"{place}.{key}"), value)
        (placement,) = value.placements
        if placement.is_partial():
            value = value.redistribute(placements=[Replicate()])
            (placement,) = value.placements
        self._tensors[place] = value.detach()
        return mark_of(place, getattr(placement, "dim", REPLICATED))

    def take_own(self, value: Any, place: str) -> Any:
        """Return nested values with marks in place of all tensors, which differ between ranks; keep the tensors."""
        if isinstance(value, DTensor):
            return self.take(value, place)
        if not isinstance(value, Tensor):
            return map_plain(lambda key, one: self.take_own(one, f"{place}.{key}"), value)
        key = f"rank {self._rank}{place}"
        self._tensors[key] = value.detach()
        return mark_of(key, OWN)

    def write(self, folder: pathlib.Path) -> None:
        """Write this rank's parts below the folder of a checkpoint. All ranks must call this."""
        writer = _IndexedWriter(folder / SHARDS_FOLDER, overwrite=False)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            save(dict(self._tensors), storage_writer=writer, planner=planner)
        except CheckpointException as error:
            rank, (failure, _) = min(error.failures.items())
            raise errors.StorageException(
                f"rank {rank} failed with {type(failure).__name__}: {failure} in {folder / SHARDS_FOLDER}."
            ) from error


class _IndexedWriter(FileSystemWriter):
    """Adds an index in JSON, and does not store the path of the folder."""

    def storage_meta(self) -> described.StorageMeta | None:
        """Return empty metadata: the folder is renamed when the checkpoint is complete."""
        return described.StorageMeta()

    def finish(self, metadata: described.Metadata, results: list[list[Any]]) -> None:
        """Write torch's description and the index, on one rank."""
        super().finish(metadata, results)
        stored = {(one.index.fqn, one.index.offset): one.storage_data for part in results for one in part}
        tensors = {key: _index_entry(key, entry, stored) for key, entry in metadata.state_dict_metadata.items()}
        pathlib.Path(self.path, INDEX_FILE).write_text(json.dumps({"format": INDEX_FORMAT, "tensors": tensors}))


def _index_entry(key: str, entry: Any, stored: Mapping[tuple[str, Any], Any]) -> dict[str, Any]:
    chunks = []
    for chunk in entry.chunks:
        if math.prod(chunk.sizes):  # empty on a rank for which nothing was left
            piece = stored[key, chunk.offsets]
            place = {"file": piece.relative_path, "begin": piece.offset, "length": piece.length}
            chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **place})
    return {"dtype": str(entry.properties.dtype).removeprefix("torch."), "size": list(entry.size), "chunks": chunks}


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _fsdp_parameters(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Reshard the models, and return FSDP's parameter objects: only they hold gradients that are not averaged yet."""
    modules = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.reshard()
    names = {id(parameter): name for name, parameter in named(models)}
    found: dict[str, Any] = {}
    try:
        for state in (module._get_fsdp_state() for module in modules):
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one, before torch 2.12
            for inner in (one for group in groups if group is not None for one in group.fsdp_params):
                found[names[id(inner.sharded_param)]] = inner
    except AttributeError as error:
        raise errors.InternalException(
            f"torch {torch.__version__} keeps gradients between aggregated steps in an unknown place "
            f"({error}); use aggregation_frequency=1 with use_fsdp(), or another version of torch."
        ) from error
    return found


def _unreduced(inner: Any) -> Tensor | None:
    accumulated: Tensor | None = inner.unsharded_accumulated_grad
    if accumulated is None and hasattr(inner, "_unsharded_param"):
        accumulated = inner._unsharded_param.grad
    return accumulated


def _set_unreduced(inner: Any, gradient: Tensor | None) -> None:
    inner.unsharded_accumulated_grad = gradient
    if hasattr(inner, "_unsharded_param"):
        inner._unsharded_param.grad = None
