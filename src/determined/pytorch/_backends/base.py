"""What a backend does: the device to train on, how models get there, and how their state gets into checkpoints."""

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
"""Suffix of the name of a gradient of one rank that is still to be averaged over all, beside one that is."""

StepsNow = Callable[[], bool]


@dataclasses.dataclass(eq=False)
class EvalBatches:
    """Batches to evaluate, up to the one after which a rank wants to stop."""

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
    """How the state of models and optimizers gets into a checkpoint and out of it: unsharded, every rank has all."""

    def shards(self) -> ShardWriter | None:
        """Return where to put tensors that ranks share; None where every rank has all."""
        return None

    def attach(self, value: Any) -> Any:
        """Return nested values with the tensors that references in them stand for."""
        return with_tensors(value, functools.cache(self._read))

    def fit_model(self, model: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return saved weights in the form that the model takes."""
        return weights

    def fit_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the saved state of an optimizer in the form that it takes."""
        return state

    def gradients(self, models: Sequence[nn.Module]) -> dict[str, Tensor]:
        """Return the gradients that there are, as between aggregated steps."""
        return {name: parameter.grad for name, parameter in named(models) if parameter.grad is not None}

    def restore_gradients(self, models: Sequence[nn.Module], saved: Mapping[str, Tensor], unreduced: bool) -> None:
        """Restore what `gradients` returned, and drop all other gradients.

        `unreduced` tells whether unsharded gradients are those of one rank, still to be averaged over all.
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
    """How this process trains. The methods here do what a process without others needs; subclasses add the ranks."""

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
        """Use these options of DDP, if there are other ranks."""

    def start(
        self, models: Sequence[nn.Module], steps_now: StepsNow | None, compressed: Sequence[nn.Parameter]
    ) -> Callable[[], None] | None:
        """Train models together with the other ranks from now on.

        Gradients are exchanged in batches for which `steps_now` returns True; those of compressed parameters in half
        precision. Returns a check to call before the first step, if there is one.
        """
        return None

    def stop(self) -> None:
        """End what `start` began."""

    def broadcast_buffers(self, models: Sequence[nn.Module]) -> None:
        """Give every rank the chief's buffers, such as running means."""

    def share(self, parameters: Sequence[nn.Parameter]) -> Callable[[Sequence[nn.Parameter]], None] | None:
        """Give parameters of no model the chief's values; return a function that averages gradients of such parameters.

        None if there are no other ranks.
        """
        return None

    def accept(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that cannot step here."""

    def check_apex(self, half_weights: bool) -> None:
        """Refuse a level of apex that cannot work here."""

    def eval_batches(self, batches: Iterable[Any], stopping: Callable[[], bool]) -> EvalBatches:
        """Return batches to evaluate without gradients."""
        return EvalBatches(batches, stopping)


class SingleProcess(Backend):
    """One process on one device: the first GPU if there is one, else the CPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
