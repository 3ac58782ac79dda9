"""Precision: fp32, autocast, half weights; and the loss scaling they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from determined.pytorch._data.tree import map_leaves

EditGradients = Callable[[list[nn.Parameter]], object]

HALF_TYPES = (torch.float16, torch.bfloat16)


class Precision:
    """Full precision, and the base of the others: what happens at each stage of a batch."""

    title = "full precision"

    def __init__(self, scaler: GradScaler | None = None) -> None:
        self._scaler = scaler

    def prepare(self, model: nn.Module) -> None:
        """Make a model, which is on its device already, compute in this precision."""

    def groups_of(self, optimizer: Optimizer) -> list[list[nn.Parameter]]:
        """Return the parameters of an optimizer by group, as the model holds them."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on."""
        return loss

    def step(self, optimizer: Optimizer, edit: EditGradients | None, scaler: GradScaler | None) -> None:
        """Step an optimizer; `edit` sees its parameters after unscaling and before the step."""
        if edit is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            edit(parameters_of(optimizer))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)

    def zero_grad(self, optimizer: Optimizer, in_place: bool) -> None:
        """Drop the gradients of an optimizer's parameters, or set them to zero in place."""
        if in_place or not _zeroes_like_torch(optimizer):
            optimizer.zero_grad(set_to_none=not in_place)
            return
        for group in optimizer.param_groups:  # same as torch, without reading each gradient first
            for parameter in group["params"]:
                parameter.grad = None

    def after_batch(self) -> None:
        """Finish a batch after all optimizers have stepped."""

    def forget_batch(self) -> None:
        """Forget which optimizers have stepped, before the batch is trained again from its start."""
        if isinstance(self._scaler, GradScaler):
            self._scaler._per_optimizer_states.clear()

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors of the scaler's state."""
        kept = (getattr(self._scaler, "_scale", None), getattr(self._scaler, "_growth_tracker", None))
        return [tensor for tensor in kept if isinstance(tensor, Tensor)]

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of a checkpoint that belong to the precision."""
        return {} if self._scaler is None else {"scaler_state_dict": self._scaler.state_dict()}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the entries of a checkpoint that belong to the precision."""
        if self._scaler is not None and "scaler_state_dict" in checkpoint:
            self._scaler.load_state_dict(checkpoint["scaler_state_dict"])


class ManualScaling(Precision):
    """Full precision, with a scaler that the trial uses and checkpoints save."""

    title = "wrap_scaler"


class Scaled(Precision):
    """Loss scaling with a scaler or none; the base of the mixed precisions."""

    def __init__(self, scaler: GradScaler | None) -> None:
        super().__init__(scaler)
        self._stepped: set[int] = set()

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(self, optimizer: Optimizer, edit: EditGradients | None, scaler: GradScaler | None) -> None:
        if scaler is None and self._scaler is not None:
            if id(optimizer) in self._stepped:  # a second step in this batch; a scaler allows one step per update
                self.after_batch()
            self._stepped.add(id(optimizer))
            scaler = self._scaler
            # torch would warn that the scheduler steps first if the scaler skips the first step.
            optimizer.__dict__["_opt_called"] = True
        super().step(optimizer, edit, scaler)

    def after_batch(self) -> None:
        """Update the scaler, once per batch in which an optimizer stepped."""
        if self._stepped and self._scaler is not None:
            self._scaler.update()
        self._stepped.clear()

    def forget_batch(self) -> None:
        super().forget_batch()
        self._stepped.clear()


class Autocast(Scaled):
    """Autocast around the forward of every model, outputs cast back to fp32."""

    title = "use_amp"

    def __init__(self, device_type: str, dtype: torch.dtype, scaler: GradScaler | None) -> None:
        super().__init__(scaler)
        self._device_type = device_type
        self._dtype = dtype

    def prepare(self, model: nn.Module) -> None:
        """Add hooks around the model's forward, which copies of the model keep."""
        hook = _AutocastHook(self._device_type, self._dtype)
        model.register_forward_pre_hook(hook.enter)
        model.register_forward_hook(hook.leave, always_call=True)


class _AutocastHook:
    """Opens autocast before a module's forward and closes it after."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._open: list[torch.autocast] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        context = torch.autocast(self._device_type, dtype=self._dtype)
        context.__enter__()  # type: ignore[no-untyped-call]  # of torch
        self._open.append(context)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._open:  # empty if another hook failed before ours ran
            self._open.pop().__exit__(None, None, None)
        return cast_floats(output, torch.float32, only=HALF_TYPES)


class StaticScaler(GradScaler):
    """A scaler with a fixed factor; it never skips a step."""

    def __init__(self, factor: float) -> None:
        super().__init__(enabled=False)
        self._factor = factor
        self._unscaled: set[int] = set()

    def scale(self, outputs: Any) -> Any:
        return outputs * self._factor

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the factor, once before each step."""
        divide_gradients(parameters_of(optimizer), self._factor)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients unless `unscale_` did, then step."""
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        self._unscaled.discard(id(optimizer))
        return optimizer.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the factor is the one that the program set."""


class BoundedScaler(GradScaler):
    """A dynamic scaler whose factor stays within bounds."""

    def __init__(self, device_type: str, smallest: float | None, largest: float) -> None:
        super().__init__(device_type, init_scale=max(min(2.0**16, largest), smallest or 0.0))
        self._smallest = smallest
        self._largest = largest

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the factor without waiting for the device."""
        super().update(new_scale)
        if self._scale is not None:
            self._scale.clamp_(min=self._smallest, max=self._largest)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def divide_gradients(parameters: Iterable[nn.Parameter], divisor: float) -> None:
    """Divide gradients in place; parameters without one are skipped."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(gradient.layout is not torch.strided for gradient in gradients):
        for gradient in gradients:
            gradient.div_(divisor)
    elif gradients:
        torch._foreach_div_(gradients, divisor)


def cast_floats(data: Any, dtype: torch.dtype, only: Sequence[torch.dtype] | None = None) -> Any:
    """Return the structure with its floating-point tensors, or `only` those of some dtypes, cast to a dtype."""

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        chosen = leaf.is_floating_point() if only is None else leaf.dtype in only
        return leaf.to(dtype) if chosen else leaf

    return map_leaves(cast, data)


def _zeroes_like_torch(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has the `zero_grad` of torch, not one of its class or a patched one."""
    return type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)
