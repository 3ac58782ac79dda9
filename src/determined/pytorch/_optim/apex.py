"""The optimization levels of NVIDIA apex, on torch's own mixed precision."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from determined import errors
from determined.pytorch._optim.precision import (
    Autocast,
    BoundedScaler,
    EditGradients,
    Scaled,
    StaticScaler,
    cast_floats,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The settings of an apex optimization level."""

    autocast: bool = False
    half_weights: bool = False
    fp32_batchnorm: bool = False
    master_weights: bool = False
    loss_scale: float | str = 1.0


LEVELS = {
    "O0": Level(),
    "O1": Level(autocast=True, loss_scale="dynamic"),
    "O2": Level(half_weights=True, fp32_batchnorm=True, master_weights=True, loss_scale="dynamic"),
    "O3": Level(half_weights=True),
}


def level_of(opt_level: str, **overrides: Any) -> Level:
    """Return the settings of "O0" to "O3", with those overrides that are not None."""
    if opt_level not in LEVELS:
        raise errors.InvalidExperimentException(
            f"configure_apex_amp(opt_level={opt_level!r}): the levels are {', '.join(LEVELS)}; O1 is the usual one."
        )
    return dataclasses.replace(LEVELS[opt_level], **{name: v for name, v in overrides.items() if v is not None})


def flag(name: str, value: bool | str | None) -> bool | None:
    """Return a flag that apex also takes as a string."""
    words: dict[Any, bool] = {"True": True, "False": False}
    found = words.get(value, value)
    if found is None or isinstance(found, bool):
        return found
    raise errors.InvalidExperimentException(f"configure_apex_amp({name}={value!r}): pass True or False.")


def precision_of(
    level: Level,
    device: torch.device,
    half: torch.dtype | None,
    output_type: torch.dtype | None,
    bounds: tuple[float | None, float],
) -> ApexPrecision:
    """Return the precision of a level on a device: fp16 on a GPU, bfloat16 elsewhere.

    Call `prepare` on all models and then `take_over` on all optimizers.
    """
    dtype = half or (torch.float16 if device.type == "cuda" else torch.bfloat16)
    scaler = _scaler(level.loss_scale, device.type, dtype, bounds)
    if level.half_weights:
        if not level.master_weights and isinstance(scaler, BoundedScaler):
            raise errors.InvalidExperimentException(
                "Dynamic loss scaling needs fp32 gradients; pass master_weights=True or a number as loss_scale."
            )
        return HalfWeights(dtype, level, output_type or torch.float32, scaler)
    if level.autocast:
        return ApexAutocast(device.type, dtype, scaler)
    return ApexPrecision(scaler)


def _scaler(
    loss_scale: float | str, device_type: str, dtype: torch.dtype, bounds: tuple[float | None, float]
) -> GradScaler | None:
    if loss_scale == "dynamic":
        # bfloat16 has the range of fp32, so gradients do not underflow and need no scaling.
        return None if dtype == torch.bfloat16 else BoundedScaler(device_type, *bounds)
    try:
        factor = float(loss_scale)
    except (TypeError, ValueError):
        factor = -1.0
    if not 0 < factor < math.inf:
        raise errors.InvalidExperimentException(
            f'configure_apex_amp(loss_scale={loss_scale!r}): pass a number above 0, or "dynamic".'
        )
    return None if factor == 1.0 else StaticScaler(factor)


class ApexPrecision(Scaled):
    """O0: fp32 throughout, and the base of the other levels.

    Keeps its state where apex programs expect it in a checkpoint: under `amp_state`.
    """

    title = "configure_apex_amp"

    def take_over(self, optimizers: Sequence[Optimizer]) -> None:
        """Make optimizers step in this precision."""

    def state_dict(self) -> dict[str, Any]:
        return {"amp_state": {} if self._scaler is None else {"scaler": self._scaler.state_dict()}}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        state = checkpoint.get("amp_state", {})
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])


class ApexAutocast(ApexPrecision, Autocast):
    """O1: fp32 weights, autocast around every forward."""


class HalfWeights(ApexPrecision):
    """O2 and O3: models in half precision; with `master_weights`, optimizers step on fp32 copies of the weights."""

    def __init__(self, dtype: torch.dtype, level: Level, output_type: torch.dtype, scaler: GradScaler | None) -> None:
        super().__init__(scaler)
        self._dtype = dtype
        self._level = level
        self._output_type = output_type
        self._masters: dict[int, list[tuple[Tensor, nn.Parameter]]] = {}

    def prepare(self, model: nn.Module) -> None:
        """Cast a model's weights and inputs to half, and its outputs back."""
        _halve(model, self._dtype, self._level.fp32_batchnorm)
        # Hooks hold no reference to this object, because copies of the model copy their hooks.
        model.register_forward_pre_hook(functools.partial(_cast_inputs, self._dtype), with_kwargs=True)
        model.register_forward_hook(functools.partial(_cast_output, self._output_type))

    def take_over(self, optimizers: Sequence[Optimizer]) -> None:
        if self._level.master_weights:
            for optimizer in optimizers:
                pairs = self._masters[id(optimizer)] = _master_copies(optimizer)
                # Trials call zero_grad() as well, to zero the gradients of the model.
                zero_grad = functools.partial(_zero_both, optimizer.zero_grad, [p for _, p in pairs])
                optimizer.zero_grad = zero_grad  # type: ignore[method-assign]  # of this object alone

    def groups_of(self, optimizer: Optimizer) -> list[list[nn.Parameter]]:
        """Return the parameters of the model, not their fp32 copies."""
        originals = {id(master): parameter for master, parameter in self._masters.get(id(optimizer), [])}
        return [[originals.get(id(one), one) for one in group] for group in super().groups_of(optimizer)]

    def step(self, optimizer: Optimizer, edit: EditGradients | None, scaler: GradScaler | None) -> None:
        """Step on the fp32 copies, then round them into the model."""
        pairs = self._masters.get(id(optimizer), [])
        for master, parameter in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        super().step(optimizer, edit, scaler)
        with torch.no_grad():
            for master, parameter in pairs:
                parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["amp_state"]["master_weights"] = [[m.detach() for m, _ in pairs] for pairs in self._masters.values()]
        return state

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the state; fp32 copies that the checkpoint does not hold get the weights of the model."""
        super().load_state_dict(checkpoint)
        saved = checkpoint.get("amp_state", {}).get("master_weights")
        saved = saved or [[parameter for _, parameter in pairs] for pairs in self._masters.values()]
        with torch.no_grad():
            for pairs, weights in zip(self._masters.values(), saved, strict=True):
                for (master, _), weight in zip(pairs, weights, strict=True):
                    master.copy_(weight)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast_floats(args, dtype), cast_floats(kwargs, dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast_floats(output, dtype)


def _halve(model: nn.Module, dtype: torch.dtype, fp32_batchnorm: bool) -> None:
    for module in model.modules():
        if not (fp32_batchnorm and isinstance(module, nn.modules.batchnorm._BatchNorm)):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN needs the new weights in one block of memory


def _master_copies(optimizer: Optimizer) -> list[tuple[Tensor, nn.Parameter]]:
    pairs: list[tuple[Tensor, nn.Parameter]] = []
    for group in optimizer.param_groups:
        originals: list[nn.Parameter] = group["params"]
        copies = [nn.Parameter(p.detach().to(torch.float32, copy=True), p.requires_grad) for p in originals]
        pairs += zip(copies, originals, strict=True)
        group["params"] = copies
    return pairs


def _zero_both(zero_copies: Callable[[bool], None], originals: list[nn.Parameter], set_to_none: bool = True) -> None:
    zero_copies(set_to_none)
    for parameter in originals:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()
