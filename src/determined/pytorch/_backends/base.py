"""The interface of backends: the device, wrapping models, and the state of models in checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from determined.pytorch._backends.shards import StoredTensor, with_tensors

if TYPE_CHECKING:
    from determined.pytorch._backends.fsdp_state import ShardWriter

UNREDUCED = " (unreduced)"
"""Suffix for the gradient of one rank that is still to be averaged over all ranks."""

StepsNow = Callable[[], bool]


@dataclasses.dataclass(eq=False)
class EvalBatches:
    """Batches to evaluate, up to the batch after which a rank asks to stop."""

    batches: Iterable[Any]
    stopping: Callable[[], bool]
    stopped: bool = dataclasses.field(default=False, init=False)
    """Whether iteration ended before the batches did."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield batch
            if self.stopping():
                self.stopped = True
                return


class StateCodec:
    """Saves and restores the state of models and optimizers; here unsharded, so that every rank has all of it."""

    def shards(self) -> ShardWriter | None:
        """Return the writer for sharded tensors; None if every rank has all tensors."""
        return None

    def attach(self, value: Any) -> Any:
        """Return nested values with tensors in place of references to stored tensors."""
        return with_tensors(value, functools.cache(self._read))

    def fit_model(self, model: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return saved weights in the form that the model takes."""
        return weights

    def fit_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the saved state of an optimizer in the form that it takes."""
        return state

    def gradients(self, models: Sequence[nn.Module]) -> dict[str, Tensor]:
        """Return the gradients that exist, as between aggregated steps."""
        return {name: parameter.grad for name, parameter in named(models) if parameter.grad is not None}

    def restore_gradients(self, models: Sequence[nn.Module], saved: Mapping[str, Tensor], unreduced: bool) -> None:
        """Restore what `gradients` returned, and drop all other gradients.

        `unreduced`: whether unsharded gradients belong to one rank and are still to be averaged over all.
        """
        for name, parameter in named(models):
            gradient = saved.get(name)
            if (own := saved.get(name + UNREDUCED)) is not None:  # of a run with sharded models
                gradient = own if gradient is None else gradient + own
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def _read(self, stored: StoredTensor) -> Tensor:
        return stored.read()


def named(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of several models, by number and name."""
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            yield f"{index}.{name}", parameter


class Backend:
    """How this process trains. This base class is for a process without others; subclasses add the other ranks."""

    codec = StateCodec()
    forward_is_collective = False
    """Whether a forward pass needs all ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model, ready to train on the device."""
        return model.to(self.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return what was given to `wrap`."""
        return model

    def configure(self, options: dict[str, Any], sync_batch_norm: bool) -> None:
        """Set options of DDP, if there are other ranks."""

    def start(
        self, models: Sequence[nn.Module], steps_now: StepsNow | None, compressed: Sequence[nn.Parameter]
    ) -> Callable[[], None] | None:
        """Train models together with the other ranks from now on.

        Gradients are exchanged in batches for which `steps_now` returns True; gradients of compressed parameters in
        half precision. Returns a check to call before the first step, if there is one.
        """
        return None

    def stop(self) -> None:
        """End what `start` began."""

    def broadcast_buffers(self, models: Sequence[nn.Module]) -> None:
        """Broadcast the chief's buffers, such as running means."""

    def share(self, parameters: Sequence[nn.Parameter]) -> Callable[[Sequence[nn.Parameter]], None] | None:
        """Broadcast the chief's values of parameters outside models; return a function that averages their gradients.

        Returns None if there are no other ranks.
        """
        return None

    def accept(self, optimizer: Optimizer) -> None:
        """Raise for an optimizer that cannot step with this backend."""

    def check_apex(self, half_weights: bool) -> None:
        """Raise for an apex level that does not work with this backend."""

    def eval_batches(self, batches: Iterable[Any], stopping: Callable[[], bool]) -> EvalBatches:
        """Return batches to evaluate without gradients."""
        return EvalBatches(batches, stopping)


class SingleProcess(Backend):
    """One process on one device: the first GPU if there is one, else the CPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
