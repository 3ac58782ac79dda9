"""Models whose weights, gradients and optimizer state are sharded over the ranks by FSDP2."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from determined import core, errors
from determined.pytorch._backends.base import EvalBatches, StepsNow
from determined.pytorch._backends.ddp import GroupBackend, broadcast
from determined.pytorch._backends.fsdp_state import ShardedState
from determined.pytorch._optim.precision import parameters_of

Chooser = Callable[[nn.Module], bool]
Units = Sequence[type[nn.Module]] | type[nn.Module] | Chooser

_NOT_CALLED = (nn.ModuleList, nn.ModuleDict)


def _check_offloading(device: torch.device) -> None:
    if device.type == "cpu":
        raise errors.InvalidExperimentException(
            "use_fsdp(offload_to_cpu=True): this process trains on the CPU, where the weights are anyway; leave it out."
        )
    backends = dist.distributed_c10d.get_backend_config()
    if "cpu:" not in backends:
        raise errors.InvalidExperimentException(
            f"use_fsdp(offload_to_cpu=True): the process group ({backends}) exchanges tensors of GPUs only, but "
            "weights would be in host memory; start the program with DET_DISTRIBUTED_BACKEND=cpu:gloo,cuda:nccl."
        )


def _policy(given: torch.dtype | MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    if given is None:
        return MixedPrecisionPolicy()
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if given not in (torch.bfloat16, torch.float32):
        raise errors.InvalidExperimentException(
            f"use_fsdp(mixed_precision={given!r}): pass torch.bfloat16 or a torch.distributed.fsdp."
            "MixedPrecisionPolicy. For fp16 call use_amp(dtype=torch.float16), which scales losses."
        )
    return MixedPrecisionPolicy(param_dtype=given, reduce_dtype=torch.float32)


def _chooser(units: Any) -> Chooser | None:
    """Return a function that selects the modules that are units; None for the default choice."""
    if units is None or (callable(units) and not isinstance(units, type)):
        return units
    classes = tuple(units) if isinstance(units, (list, tuple, set, frozenset)) else (units,)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise errors.InvalidExperimentException(
                f"use_fsdp(units={units!r}): pass classes of modules, such as [Block], or a function of a module; "
                f"{one!r} is neither."
            )
    return lambda module: isinstance(module, classes)


class Sharded(GroupBackend):
    """One of several processes that each have a part of every model. `use_fsdp` describes the options."""

    forward_is_collective = True

    def __init__(
        self,
        device: torch.device,
        distributed: core.DistributedContext,
        *,
        units: Units | None,
        mixed_precision: torch.dtype | MixedPrecisionPolicy | None,
        activation_checkpointing: bool,
        reshard_after_forward: bool,
        offload_to_cpu: bool,
    ) -> None:
        super().__init__(device)
        if offload_to_cpu:
            _check_offloading(device)
        self._policy = self._root_policy = _policy(mixed_precision)
        if isinstance(mixed_precision, torch.dtype):  # as with use_amp, the loss is computed in full precision
            self._root_policy = dataclasses.replace(self._policy, output_dtype=torch.float32)
        self._is_unit = _chooser(units)
        self._recomputes = activation_checkpointing
        self._reshards = reshard_after_forward
        self._offload = CPUOffloadPolicy() if offload_to_cpu else OffloadPolicy()
        self._distributed = distributed
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._wrapped: list[nn.Module] = []
        self._hooks: list[Any] = []
        self._replaced: list[weakref.ref[nn.Parameter]] = []
        self.codec = ShardedState(self._mesh)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model, with this rank's part of the weights that the chief has."""
        if any(tensor.is_meta for tensor in _tensors(model)):
            raise errors.InvalidExperimentException(
                f"wrap_model({type(model).__name__}): its weights are on the meta device, which holds none; build it "
                "on the CPU. Each process then has the whole model in its memory, until wrap_model() returns."
            )
        units = chosen_units(model, self._is_unit)
        if self._recomputes:
            for unit in units or [model]:
                # No wrapper, so that weights keep their names; a partial, so that a copy calls its own forward.
                unit.forward = functools.partial(_recompute, unit.forward)
        self._replaced += map(weakref.ref, model.parameters())
        # One at a time, so that the device never holds the whole model.
        for unit in [*reversed(units), model]:
            self._shard(unit, is_root=unit is model)
        self._wrapped.append(model)
        return model

    def _shard(self, module: nn.Module, *, is_root: bool) -> None:
        whole = [tensor for tensor in _tensors(module) if not isinstance(tensor, DTensor)]
        for tensor in whole:
            tensor.data = tensor.data.to(self.device)
        broadcast(whole, self.device)
        fully_shard(
            module,
            mesh=self._mesh,
            # Backward needs the root's own weights first, so they are kept.
            reshard_after_forward=self._reshards and not is_root,
            mp_policy=self._root_policy if is_root else self._policy,
            offload_policy=self._offload,
        )

    def accept(self, optimizer: Optimizer) -> None:
        """Raise for an optimizer of weights from before a model was sharded; disable foreach for mixed groups."""
        replaced = {id(parameter) for reference in self._replaced if (parameter := reference()) is not None}
        stale = sum(id(parameter) in replaced for parameter in parameters_of(optimizer))
        if stale:
            raise errors.InvalidExperimentException(
                f"wrap_optimizer({type(optimizer).__name__}): {stale} of its parameters are those that a model had "
                "before use_fsdp() sharded it over the ranks. wrap_model() gives the model new ones: make the "
                "optimizer after it, from self.model.parameters()."
            )
        for group in optimizer.param_groups:
            kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
            if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = False  # torch cannot step sharded and whole parameters in one call

    def configure(self, options: dict[str, Any], sync_batch_norm: bool) -> None:
        raise errors.InvalidExperimentException("use_ddp() does not go together with use_fsdp(); call one of them.")

    def check_apex(self, half_weights: bool) -> None:
        if half_weights:
            raise errors.InvalidExperimentException(
                "configure_apex_amp() with half weights (O2, O3) does not go together with use_fsdp(); use "
                "use_fsdp(mixed_precision=torch.bfloat16), or opt_level='O1'."
            )

    def start(
        self, models: Sequence[nn.Module], steps_now: StepsNow | None, compressed: Sequence[nn.Parameter]
    ) -> Callable[[], None] | None:
        if compressed:
            raise errors.InvalidExperimentException(
                "wrap_optimizer(fp16_compression=True) does not go together with use_fsdp(); pass use_fsdp("
                "mixed_precision=torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))."
            )
        if steps_now is not None:
            hook = functools.partial(_sync_if_stepping, steps_now)
            self._hooks += [model.register_forward_pre_hook(hook) for model in models]
        return None

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for model in self._wrapped:
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(True)
        gc.collect()

    def eval_batches(self, batches: Iterable[Any], stopping: Callable[[], bool]) -> EvalBatches:
        return CollectiveEvalBatches(batches, stopping, self._distributed, self._wrapped)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _sync_if_stepping(steps_now: StepsNow, model: Any, args: Any) -> None:
    """Let the backward after this forward exchange gradients only if the optimizer steps."""
    if torch.is_grad_enabled():
        model.set_requires_gradient_sync(steps_now())


def _recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a forward whose activations are recomputed in backward instead of being kept."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


# Units


def chosen_units(model: nn.Module, is_unit: Chooser | None) -> list[nn.Module]:
    """Return the modules inside a model whose weights are gathered together, outer ones first."""
    if is_unit is None:
        return [unit for unit in _repeated(model) if not _shares_weights(unit, model)]
    chosen = [module for module in model.modules() if module is not model and _has_weights(module) and is_unit(module)]
    for unit in chosen:
        kind = type(unit).__name__
        if isinstance(unit, _NOT_CALLED):
            raise errors.InvalidExperimentException(
                f"use_fsdp(units=...) chooses a {kind}, which is never called itself; choose the modules in it."
            )
        if _shares_weights(unit, model):
            raise errors.InvalidExperimentException(
                f"use_fsdp(units=...) chooses a {kind} that shares weights with other parts of "
                f"{type(model).__name__}; leave it out, so that they stay together."
            )
    if not chosen:
        kinds = sorted({type(module).__name__ for module in model.modules() if _has_weights(module)})
        raise errors.InvalidExperimentException(
            f"use_fsdp(units=...) chooses no module with weights inside {type(model).__name__}, which has {kinds}; "
            "pass the class of its repeated blocks, or leave units out."
        )
    return chosen


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of the outermost lists and sequences of modules."""
    for child in module.children():
        if not _has_weights(child):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, _NOT_CALLED):
            yield child
        else:
            yield from _repeated(child)


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _shares_weights(unit: nn.Module, model: nn.Module) -> bool:
    """Return whether other parts of the model share weights of a unit."""
    inside, everywhere = (
        Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        for module in (unit, model)
    )
    return any(everywhere[key] != count for key, count in inside.items())


# Evaluation


@dataclasses.dataclass(eq=False)
class CollectiveEvalBatches(EvalBatches):
    """Batches of a rank that joins the forward passes of the other ranks when it has none left.

    A forward pass gathers weights from all ranks, so all must run the same number of them. A rank without batches
    repeats the model calls of its last batch and drops the results.
    """

    distributed: core.DistributedContext
    models: Sequence[nn.Module]
    _calls: list[tuple[nn.Module, Any, Any]] = dataclasses.field(default_factory=list, init=False)

    def __iter__(self) -> Iterator[Any]:
        with contextlib.ExitStack() as hooks:
            for model in self.models:
                hooks.enter_context(model.register_forward_pre_hook(self._remember, with_kwargs=True))
            yield from self._iterate()

    def _iterate(self) -> Iterator[Any]:
        batches, nothing = iter(self.batches), object()
        for number in itertools.count():
            batch = next(batches, nothing)
            wants_stop = number > 0 and self.stopping()
            per_rank = self.distributed.allgather((batch is not nothing, wants_stop))
            have_one = [has_batch for has_batch, _ in per_rank]
            self.stopped = any(stop for _, stop in per_rank)
            if self.stopped or not any(have_one):
                return
            if number == 0 and not all(have_one):
                raise RuntimeError(
                    f"The validation data gives batches to {sum(have_one)} of {len(have_one)} processes; with "
                    "use_fsdp() each needs one, since all compute together. Use a smaller batch_size for validation, "
                    "or more data."
                )
            if batch is nothing:
                calls = self._calls[:]
                for model, args, kwargs in calls:
                    model(*args, **kwargs)
                self._calls = calls
            else:
                self._calls.clear()
                yield batch

    def _remember(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls.append((model, args, kwargs))
