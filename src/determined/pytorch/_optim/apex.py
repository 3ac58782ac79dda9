"""The optimization levels of NVIDIA apex, on torch's own mixed precision."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from determined import errors
from determined.pytorch._optim.precision import (
    Autocast,
    BoundedScaler,
    EditGradients,
    Scaled,
    Scaler,
    StaticScale,
    cast_floats,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What an apex optimization level switches on."""

    autocast: bool = False
    half_weights: bool = False
    fp32_batchnorm: bool = False
    master_weights: bool = False
    loss_scale: float | str = 1.0

    def override(self, **given: Any) -> Level:
        """Return the level with the settings that were given, not None, in place of its own."""
        return dataclasses.replace(self, **{name: value for name, value in given.items() if value is not None})


LEVELS = {
    "O0": Level(),
    "O1": Level(autocast=True, loss_scale="dynamic"),
    "O2": Level(half_weights=True, fp32_batchnorm=True, master_weights=True, loss_scale="dynamic"),
    "O3": Level(half_weights=True),
}


def level_of(opt_level: str) -> Level:
    """Return the settings of "O0" to "O3"."""
    if opt_level not in LEVELS:
        raise errors.InvalidExperimentException(
            f"configure_apex_amp(opt_level={opt_level!r}): the levels are {', '.join(LEVELS)}; O1 is the usual one."
        )
    return LEVELS[opt_level]


def precision_of(
    level: Level,
    device: torch.device,
    half: torch.dtype | None,
    output_type: torch.dtype | None,
    bounds: tuple[float | None, float],
) -> Scaled:
    """Return the precision of a level on a device: fp16 on a GPU, bfloat16 elsewhere."""
    dtype = half or (torch.float16 if device.type == "cuda" else torch.bfloat16)
    scaler = _scaler(level.loss_scale, device.type, dtype, bounds)
    if level.half_weights:
        if not level.master_weights and isinstance(scaler, torch.amp.GradScaler):
            raise errors.InvalidExperimentException(
                "Dynamic loss scaling needs fp32 gradients; pass master_weights=True or a number as loss_scale."
            )
        return HalfWeights(dtype, level, output_type or torch.float32, scaler)
    if level.autocast:
        return ApexAutocast(device.type, dtype, scaler)
    return ApexFull(scaler)


def _scaler(
    loss_scale: float | str, device_type: str, dtype: torch.dtype, bounds: tuple[float | None, float]
) -> Scaler | None:
    if loss_scale == "dynamic":
        # bfloat16 has the range of fp32: nothing vanishes, so nothing needs scaling.
        return None if dtype == torch.bfloat16 else BoundedScaler(device_type, *bounds)
    try:
        factor = float(loss_scale)
    except (TypeError, ValueError):
        factor = -1.0
    if not 0 < factor < math.inf:
        raise errors.InvalidExperimentException(
            f'configure_apex_amp(loss_scale={loss_scale!r}): pass a number above 0, or "dynamic".'
        )
    return None if factor == 1.0 else StaticScale(factor)


class _AmpState(Scaled):
    """Keeps its state where apex programs expect it in a checkpoint."""

    title = "configure_apex_amp"

    def state_dict(self) -> dict[str, Any]:
        """Return the state under `amp_state`."""
        return {"amp_state": self._amp_state()}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over the state from `amp_state`."""
        self._load_amp_state(checkpoint.get("amp_state", {}))

    def _amp_state(self) -> dict[str, Any]:
        return {} if self._scaler is None else {"scaler": self._scaler.state_dict()}

    def _load_amp_state(self, state: Mapping[str, Any]) -> None:
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])


class ApexFull(_AmpState):
    """O0: fp32 throughout."""


class ApexAutocast(_AmpState, Autocast):
    """O1: fp32 weights, autocast around every forward."""


class HalfWeights(_AmpState):
    """O2 and O3: models in half precision; optimizers on fp32 copies of the weights if asked."""

    def __init__(self, dtype: torch.dtype, level: Level, output_type: torch.dtype, scaler: Scaler | None) -> None:
        super().__init__(scaler)
        self._dtype = dtype
        self._level = level
        self._output_type = output_type
        self._masters: dict[int, list[tuple[Tensor, nn.Parameter]]] = {}

    def prepare(self, model: nn.Module) -> None:
        """Turn a model's weights to half, its inputs to half and its outputs back."""
        _halve(model, self._dtype, self._level.fp32_batchnorm)
        hook = _CastHook(self._dtype, self._output_type)
        model.register_forward_pre_hook(hook.enter, with_kwargs=True)
        model.register_forward_hook(hook.leave)

    def take_over(self, optimizers: Sequence[Optimizer]) -> None:
        """Put fp32 copies of the weights into the optimizers, if the level has them."""
        if self._level.master_weights:
            for optimizer in optimizers:
                pairs = self._masters[id(optimizer)] = _master_copies(optimizer)
                # Trials call it too, and mean the gradients that backward leaves in the model.
                zero_grad = functools.partial(_zero_both, optimizer.zero_grad, [p for _, p in pairs])
                optimizer.zero_grad = zero_grad  # type: ignore[method-assign]  # of this object alone

    def groups_of(self, optimizer: Optimizer) -> list[list[nn.Parameter]]:
        """Return the parameters of which the optimizer has fp32 copies."""
        originals = {id(master): parameter for master, parameter in self._masters.get(id(optimizer), [])}
        return [[originals.get(id(one), one) for one in group] for group in super().groups_of(optimizer)]

    def step(self, optimizer: Optimizer, edit: EditGradients | None, scaler: Scaler | None) -> None:
        """Step on the fp32 copies, then round them into the model."""
        pairs = self._masters.get(id(optimizer), [])
        for master, parameter in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        super().step(optimizer, edit, scaler)
        _round(pairs)

    def _amp_state(self) -> dict[str, Any]:
        masters = [[master.detach() for master, _ in pairs] for pairs in self._masters.values()]
        return super()._amp_state() | {"master_weights": masters}

    def _load_amp_state(self, state: Mapping[str, Any]) -> None:
        super()._load_amp_state(state)
        saved = state.get("master_weights") or [[p for _, p in pairs] for pairs in self._masters.values()]
        with torch.no_grad():
            for pairs, weights in zip(self._masters.values(), saved, strict=True):
                for (master, _), weight in zip(pairs, weights, strict=True):
                    master.copy_(weight)


class _CastHook:
    """Casts a module's inputs and outputs; apart from the precision, which copies of the model must not take along."""

    def __init__(self, input_type: torch.dtype, output_type: torch.dtype) -> None:
        self._input_type = input_type
        self._output_type = output_type

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_floats(args, self._input_type), cast_floats(kwargs, self._input_type)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floats(output, self._output_type)


def _halve(model: nn.Module, dtype: torch.dtype, fp32_batchnorm: bool) -> None:
    for module in model.modules():
        if not (fp32_batchnorm and isinstance(module, nn.modules.batchnorm._BatchNorm)):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants the new weights in one piece


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


@torch.no_grad()
def _round(pairs: list[tuple[Tensor, nn.Parameter]]) -> None:
    for master, parameter in pairs:
        parameter.copy_(master)


def choose(
    *,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    device: torch.device,
    level: Level,
    cast_model_type: torch.dtype | None,
    cast_model_outputs: torch.dtype | None,
    bounds: tuple[float | None, float],
) -> Scaled:
    """Return the precision for these models and optimizers, and make them fit it."""
    precision = precision_of(level, device, cast_model_type, cast_model_outputs, bounds)
    for model in models:
        precision.prepare(model)
    if isinstance(precision, HalfWeights):
        precision.take_over(optimizers)
    return precision
