"""Models of which every rank has a replica, kept equal by DDP."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from determined import errors
from determined.pytorch._backends.base import Backend, StepsNow

_BROADCAST_BYTES = 32 * 2**20
_UNUSED_PARAMETERS = "Expected to have finished reduction in the prior iteration"


class Replicated(nn.Module):
    """A model whose gradients are averaged over all ranks while a trial trains.

    Attributes and names of weights are the inner module's. Without gradients it runs without the other ranks, so ranks
    may evaluate different numbers of batches.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for name in ("state_dict", "load_state_dict", "named_parameters", "named_buffers"):
            self.__dict__[name] = getattr(module, name)  # without the prefix `module.`
        self.engage(None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns; with gradients, backward then averages them over all ranks."""
        engine, steps_now = self.__dict__["_engine"]
        if engine is None or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self.__dict__["is_used"] = True
        if steps_now is not None:
            engine.require_backward_grad_sync = steps_now()
        try:
            return engine(*args, **kwargs)
        except RuntimeError as error:
            if _UNUSED_PARAMETERS in str(error):
                error.add_note(
                    "In a trial, call context.experimental.use_ddp(find_unused_parameters=True) before wrap_model()."
                )
            raise

    def engage(self, engine: DistributedDataParallel | None, steps_now: StepsNow | None = None) -> None:
        """Average gradients by this engine, or by none; with `steps_now`, only in batches for which that is True."""
        # Not by nn.Module.__setattr__, which would register the engine as a child with the same weights.
        self.__dict__["_engine"] = engine, steps_now
        self.__dict__["is_used"] = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        # A copy, such as one for averaged weights, is not synchronized.
        return {**self.__dict__, "_engine": (None, None)}


class GroupBackend(Backend):
    """One of several processes of a torch process group."""

    def broadcast_buffers(self, models: Sequence[nn.Module]) -> None:
        broadcast([buffer for model in models for buffer in model.buffers()], self.device)

    def share(self, parameters: Sequence[nn.Parameter]) -> Callable[[Sequence[nn.Parameter]], None] | None:
        broadcast(parameters, self.device)
        return functools.partial(average_gradients, device=self.device)


class Replicas(GroupBackend):
    """One of several processes that train replicas of the same models."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._options: dict[str, Any] = {}
        self._sync_batch_norm = False
        self._engaged: list[Replicated] = []

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, with the weights of the chief."""
        model = model.to(self.device)
        if self._sync_batch_norm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # of torch
        broadcast([*model.parameters(), *model.buffers()], self.device)
        return Replicated(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, Replicated) else model

    def configure(self, options: dict[str, Any], sync_batch_norm: bool) -> None:
        known = inspect.signature(DistributedDataParallel).parameters.keys() - {"module", "device_ids", "init_sync"}
        if unknown := sorted(options.keys() - known):
            raise errors.InvalidExperimentException(f"use_ddp({unknown[0]}=...): DDP's options are {sorted(known)}.")
        if sync_batch_norm and self.device.type == "cpu":
            raise errors.InvalidExperimentException(
                "use_ddp(sync_batch_norm=True): torch synchronizes batch norm on GPUs only; leave it out on a CPU."
            )
        self._options, self._sync_batch_norm = options, sync_batch_norm

    def start(
        self, models: Sequence[nn.Module], steps_now: StepsNow | None, compressed: Sequence[nn.Parameter]
    ) -> Callable[[], None] | None:
        for model in models:
            if not isinstance(model, Replicated) or not any(p.requires_grad for p in model.parameters()):
                continue
            engine = self._engine_of(model.module)
            own = {id(parameter) for parameter in model.parameters()}
            if any(id(parameter) in own for parameter in compressed):
                from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

                engine.register_comm_hook(None, default_hooks.fp16_compress_hook)
            model.engage(engine, steps_now)
            self._engaged.append(model)
        return self._check_use

    def _check_use(self) -> None:
        """Raise for gradients that were computed without the engine: the weights of the ranks would diverge."""
        for model in self._engaged:
            if not model.is_used and any(parameter.grad is not None for parameter in model.parameters()):
                raise errors.InvalidExperimentException(
                    f"The model {type(model.module).__name__} has gradients, but was not called itself: one of its "
                    "methods or parts was, so gradients are not averaged over the ranks. Call the wrapped model, as in "
                    "self.model(x), and let its forward() call the rest."
                )

    def stop(self) -> None:
        """Drop all references to the process group: gloo can abort at exit otherwise."""
        for model in self._engaged:
            model.engage(None)
        self._engaged.clear()
        gc.collect()

    def broadcast_buffers(self, models: Sequence[nn.Module]) -> None:
        """Broadcast the chief's buffers; DDP does so only in training."""
        if self._options.get("broadcast_buffers", True):
            super().broadcast_buffers(models)

    def _engine_of(self, module: nn.Module) -> DistributedDataParallel:
        # Without device_ids: inputs are on the device already.
        engine = DistributedDataParallel(module, init_sync=False, **self._options)
        rebuilds = not (self._options.get("find_unused_parameters") or self._options.get("static_graph"))
        if rebuilds and not any(getattr(part, "sparse", False) for part in module.modules()):
            settle_buckets(engine)
        return engine


def settle_buckets(engine: DistributedDataParallel) -> None:
    """Let DDP arrange its buckets of gradients now, in an order that depends on the model alone.

    DDP does so after the first backward. A resumed run would sum its first step's gradients in another order than the
    uninterrupted run, and with three ranks or more the last bits would differ.
    """
    parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    module = engine.module
    for parameter in parameters:
        parameter.grad = None
    engine.module = _Touch(module, parameters)
    try:
        engine().backward()
    finally:
        engine.module = module
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


class _Touch(nn.Module):
    """Uses every parameter in order, so that zero gradients arrive in reverse order."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.named_buffers = module.named_buffers  # type: ignore[method-assign]  # DDP broadcasts these
        self._touched = parameters

    def forward(self) -> Tensor:
        return torch.stack([p.reshape(-1)[:1].abs().sum().float() * 0 for p in self._touched]).sum()


class NoGroup(Backend):
    """One of several processes that have a `DistributedContext`, but no torch process group."""

    def __init__(self, device: torch.device, size: int) -> None:
        super().__init__(device)
        self._size = size

    def wrap(self, model: nn.Module) -> nn.Module:
        """Raise: the replicas of the model would diverge."""
        raise errors.InvalidExperimentException(
            f"wrap_model({type(model).__name__}): init() got a DistributedContext of {self._size} processes, but "
            "torch.distributed has no process group by which they could average gradients. Call "
            "torch.distributed.init_process_group() before init(), or start the program with torchrun and leave "
            "`distributed` out."
        )


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Average the gradients of parameters over all ranks, through tensors on a device.

    A missing gradient counts as zeros. Where no rank has one, it stays missing, so that optimizers skip it.
    """
    for group in _by_dtype([parameter for parameter in parameters if parameter.requires_grad]):
        present = [parameter.grad is not None for parameter in group]
        gradients = [_dense_gradient(parameter) for parameter in group]
        counts = torch.tensor(present, dtype=group[0].dtype, device=device)
        _exchange([*gradients, counts], device, _average)
        # Read only if needed, since that waits for the GPU.
        wanted = present if all(present) else counts.tolist()
        for parameter, gradient, is_there in zip(group, gradients, wanted, strict=True):
            if is_there:
                parameter.grad = gradient


def _average(flat: Tensor) -> None:
    flat.div_(dist.get_world_size())
    dist.all_reduce(flat)


def _dense_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    if parameter.grad.layout is not torch.strided:
        raise errors.InvalidExperimentException(
            f"A parameter of shape {tuple(parameter.shape)} belongs to no wrapped model and has a sparse gradient, "
            "which is not averaged over ranks; call context.wrap_model() on its module, or use sparse=False."
        )
    return parameter.grad


def broadcast(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Broadcast the chief's values of tensors, through tensors on a device."""
    for group in _by_dtype([tensor.detach() for tensor in tensors]):
        message: list[Tensor] = []
        for tensor in group:
            message.append(tensor)
            if tensor is group[-1] or sum(one.nbytes for one in message) >= _BROADCAST_BYTES:
                _exchange(message, device, functools.partial(dist.broadcast, src=0))
                message = []


def _by_dtype(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return by_dtype.values()


def _exchange(tensors: Sequence[Tensor], device: torch.device, collective: Callable[[Tensor], object]) -> None:
    """Run a collective on tensors of one dtype in one message, and store the results in them."""
    flat = torch.cat([tensor.reshape(-1).to(device) for tensor in tensors])
    collective(flat)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
