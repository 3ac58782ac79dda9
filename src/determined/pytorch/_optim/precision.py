"""Number formats: full, autocast, half weights; and the loss scaling they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

EditGradients = Callable[[list[nn.Parameter]], object]

HALF_TYPES = (torch.float16, torch.bfloat16)


class Scaler(Protocol):
    """What `torch.amp.GradScaler` does: keeps small half-precision gradients from vanishing."""

    def scale(self, outputs: Tensor) -> Tensor: ...

    def unscale_(self, optimizer: Optimizer) -> None: ...

    def step(self, optimizer: Optimizer) -> object: ...

    def update(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Precision:
    """Full precision, and the base of the others: what happens at each stage of a batch."""

    title = "full precision"

    def prepare(self, model: nn.Module) -> None:
        """Make a model, already on its device, compute in this precision."""

    def groups_of(self, optimizer: Optimizer) -> list[list[nn.Parameter]]:
        """Return the parameters of an optimizer by group, those that the program computes with."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on."""
        return loss

    def step(self, optimizer: Optimizer, edit: EditGradients | None, scaler: Scaler | None) -> None:
        """Step an optimizer; `edit` sees its parameters after unscaling and before the step."""
        if scaler is None:
            if edit is not None:
                edit(parameters_of(optimizer))
            optimizer.step()
            return
        if edit is not None:
            scaler.unscale_(optimizer)
            edit(parameters_of(optimizer))
        scaler.step(optimizer)

    def zero_grad(self, optimizer: Optimizer, in_place: bool) -> None:
        """Drop the gradients of an optimizer's parameters, or set them to zero where they are."""
        if in_place or not _zeroes_like_torch(optimizer):
            optimizer.zero_grad(set_to_none=not in_place)
            return
        for group in optimizer.param_groups:  # what torch does, but it looks at each gradient before
            for parameter in group["params"]:
                parameter.grad = None

    def after_batch(self) -> None:
        """Finish a batch after all optimizers have stepped."""

    def forget_batch(self) -> None:
        """Drop what is known of the steps of a batch that is begun anew."""

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors in which the precision keeps what it adapts."""
        return []

    @property
    def has_work_after_batch(self) -> bool:
        """Whether `after_batch` does anything."""
        return type(self).after_batch is not Precision.after_batch

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of a checkpoint that belong to the precision."""
        return {}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over the entries of a checkpoint that belong to the precision."""


class ManualScaling(Precision):
    """Full precision, with a scaler that the trial uses by itself and we save."""

    title = "wrap_scaler"

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = scaler

    def forget_batch(self) -> None:
        """Let the scaler forget which optimizers have stepped."""
        _forget_steps(self._scaler)

    def state_tensors(self) -> list[Tensor]:
        """Return those of the scaler."""
        return _tensors_of(self._scaler)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler."""
        return {"scaler_state_dict": self._scaler.state_dict()}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over the state of the scaler."""
        if "scaler_state_dict" in checkpoint:
            self._scaler.load_state_dict(checkpoint["scaler_state_dict"])


class Scaled(Precision):
    """Loss scaling by ourselves, with any scaler or none; the base of the mixed precisions."""

    def __init__(self, scaler: Scaler | None) -> None:
        self._scaler = scaler
        self._stepped: set[int] = set()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss, scaled."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(self, optimizer: Optimizer, edit: EditGradients | None, scaler: Scaler | None) -> None:
        """Step an optimizer on unscaled gradients."""
        if scaler is None and self._scaler is not None:
            if id(optimizer) in self._stepped:  # a second step within the batch; a scaler allows one an update
                self.after_batch()
            self._stepped.add(id(optimizer))
            scaler = self._scaler
            # A step that the scaler leaves out is no reason for torch to warn of schedulers that go first.
            optimizer.__dict__["_opt_called"] = True
        super().step(optimizer, edit, scaler)

    def after_batch(self) -> None:
        """Let the scaler adapt, once a batch in which something stepped."""
        if self._stepped and self._scaler is not None:
            self._scaler.update()
        self._stepped.clear()

    def forget_batch(self) -> None:
        """Forget which optimizers have stepped."""
        self._stepped.clear()
        _forget_steps(self._scaler)

    def state_tensors(self) -> list[Tensor]:
        """Return those of the scaler."""
        return _tensors_of(self._scaler)


class Autocast(Scaled):
    """Autocast around the forward of every model, outputs back in fp32."""

    title = "use_amp"

    def __init__(self, device_type: str, dtype: torch.dtype, scaler: Scaler | None) -> None:
        super().__init__(scaler)
        self._device_type = device_type
        self._dtype = dtype

    def prepare(self, model: nn.Module) -> None:
        """Add hooks, which copies of the model keep, around its forward."""
        hook = _AutocastHook(self._device_type, self._dtype)
        model.register_forward_pre_hook(hook.enter)
        model.register_forward_hook(hook.leave, always_call=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler."""
        return {} if self._scaler is None else {"scaler_state_dict": self._scaler.state_dict()}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over the state of the scaler."""
        if self._scaler is not None and "scaler_state_dict" in checkpoint:
            self._scaler.load_state_dict(checkpoint["scaler_state_dict"])


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
        if self._open:  # nothing is, where another hook failed before ours began
            self._open.pop().__exit__(None, None, None)
        return cast_floats(output, torch.float32, only=HALF_TYPES)


class StaticScale:
    """A scaler with a fixed factor, which never skips a step."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._unscaled: set[int] = set()

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the outputs times the factor."""
        return outputs * self._factor

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the factor; once before each step."""
        divide_gradients(parameters_of(optimizer), self._factor)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer) -> object:
        """Unscale if nobody has, then step."""
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        self._unscaled.discard(id(optimizer))
        return optimizer.step()

    def update(self) -> None:
        """Change nothing: the factor is fixed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the factor."""
        return {"scale": self._factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the factor that the program asks for."""


class BoundedScaler(torch.amp.GradScaler):
    """A dynamic scaler whose factor stays within bounds."""

    def __init__(self, device_type: str, smallest: float | None, largest: float, start: float = 2.0**16) -> None:
        super().__init__(device_type, init_scale=max(min(start, largest), smallest or 0.0))
        self._smallest = smallest
        self._largest = largest

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the factor without waiting for the device."""
        super().update(new_scale)
        if self._scale is not None:
            self._scale.clamp_(min=self._smallest, max=self._largest)


def _forget_steps(scaler: Any) -> None:
    if isinstance(scaler, torch.amp.GradScaler):
        scaler._per_optimizer_states.clear()


def _tensors_of(scaler: Any) -> list[Tensor]:
    kept = (getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None))
    return [tensor for tensor in kept if isinstance(tensor, Tensor)]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def divide_gradients(parameters: Iterable[nn.Parameter], divisor: float) -> None:
    """Divide the gradients that there are, in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(gradient.layout is not torch.strided for gradient in gradients):
        for gradient in gradients:
            gradient.div_(divisor)
    elif gradients:
        torch._foreach_div_(gradients, divisor)


def cast_floats(data: Any, dtype: torch.dtype, only: Sequence[torch.dtype] | None = None) -> Any:
    """Return the structure with its floating-point tensors, or `only` those of some formats, in another format."""
    if isinstance(data, Tensor):
        chosen = data.is_floating_point() if only is None else data.dtype in only
        return data.to(dtype) if chosen else data
    if isinstance(data, Mapping):
        cast = {key: cast_floats(value, dtype, only) for key, value in data.items()}
        return cast if type(data) is dict else _rebuilt(data, cast)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(cast_floats(value, dtype, only) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(cast_floats(value, dtype, only) for value in data)
    return data


def _rebuilt(original: Mapping[str, Any], values: dict[str, Any]) -> Any:
    """Return a mapping of the original's type, such as the output classes of Hugging Face models."""
    return type(original)(**values) if all(isinstance(key, str) for key in values) else values


def _zeroes_like_torch(optimizer: Optimizer) -> bool:
    """Say whether neither the class of an optimizer nor anybody else has changed how it zeroes gradients."""
    return type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)
