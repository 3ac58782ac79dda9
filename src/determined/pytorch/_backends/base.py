"""Where a trial trains: which device, and how models get there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from determined.pytorch._backends.state_codec import StateCodec, UnshardedState

StepsNow = Callable[[], bool]


class EvalBatches:
    """Batches to evaluate, up to the one after which somebody wants to stop."""

    def __init__(self, batches: Iterable[Any], stopping: Callable[[], bool]) -> None:
        self._batches = batches
        self._stopping = stopping
        self.stopped = False
        """Whether it ended before the batches did."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield batch
            if self._stopping():
                self.stopped = True
                return


class Backend(Protocol):
    """How this process trains, alone or with others."""

    device: torch.device
    forward_is_collective: bool
    """Whether a forward pass needs all ranks."""

    @property
    def codec(self) -> StateCodec:
        """How the state of models gets into checkpoints."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model, ready to train on the device."""
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return what was given to `wrap`."""
        ...

    def configure(self, options: dict[str, Any], sync_batch_norm: bool) -> None:
        """Use these options of DDP, if there are other ranks."""
        ...

    def start(
        self, models: Sequence[nn.Module], steps_now: StepsNow | None, compressed: Sequence[nn.Parameter]
    ) -> Callable[[], None] | None:
        """Train models together with the other ranks from now on.

        Gradients are exchanged in batches for which `steps_now` says so; those of compressed parameters in half
        precision. What is returned is to be called before the first step.
        """
        ...

    def stop(self) -> None:
        """End what `start` began."""
        ...

    def broadcast_buffers(self, models: Sequence[nn.Module]) -> None:
        """Give every rank the chief's buffers."""
        ...

    def share(self, parameters: Sequence[nn.Parameter]) -> Callable[[Sequence[nn.Parameter]], None] | None:
        """Give parameters that belong to no model the chief's values; return what averages gradients of such ones.

        None if there are no other ranks.
        """
        ...

    def accept(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that cannot step here."""
        ...

    def check_apex(self, half_weights: bool) -> None:
        """Refuse a level of apex that cannot work here."""
        ...

    def eval_batches(self, batches: Iterable[Any], stopping: Callable[[], bool]) -> EvalBatches:
        """Return batches to evaluate without gradients."""
        ...


class Whole:
    """What holds wherever a process has whole models."""

    forward_is_collective = False

    @property
    def codec(self) -> StateCodec:
        """How the state of models gets into checkpoints: as it is."""
        return UnshardedState()

    def accept(self, optimizer: Optimizer) -> None:
        """Take any optimizer."""

    def check_apex(self, half_weights: bool) -> None:
        """Take any level."""

    def eval_batches(self, batches: Iterable[Any], stopping: Callable[[], bool]) -> EvalBatches:
        """Return the batches: each rank evaluates its own by itself."""
        return EvalBatches(batches, stopping)


class Alone(Whole):
    """What a process does that has no others to train with: nothing."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model

    def configure(self, options: dict[str, Any], sync_batch_norm: bool) -> None:
        """Leave options aside."""

    def start(
        self, models: Sequence[nn.Module], steps_now: StepsNow | None, compressed: Sequence[nn.Parameter]
    ) -> Callable[[], None] | None:
        """Begin nothing."""
        return None

    def share(self, parameters: Sequence[nn.Parameter]) -> Callable[[Sequence[nn.Parameter]], None] | None:
        """Share nothing."""
        return None

    def stop(self) -> None:
        """End nothing."""

    def broadcast_buffers(self, models: Sequence[nn.Module]) -> None:
        """Leave buffers as they are."""


class SingleProcess(Alone):
    """One process on one device: the first GPU if there is one, else the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model, on the device."""
        return model.to(self.device)


def cuda_device(local_rank: int) -> torch.device:
    """Return the GPU of a process."""
    count = torch.cuda.device_count()
    if count == 1 and "SLURM_PROCID" in os.environ:  # each task of `srun --gpus-per-task=1` sees its own GPU alone
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise RuntimeError(
            f"This machine has {count} GPUs, but the process of local rank {local_rank} needs one of its own; start "
            f"{count} processes on it (torchrun --nproc-per-node {count}), or set CUDA_VISIBLE_DEVICES='' to train on "
            "the CPU."
        )
    return torch.device("cuda", local_rank)
