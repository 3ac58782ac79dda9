"""Optimizer steps: aggregate, average, clip, step, zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from determined import errors
from determined.pytorch._optim.precision import EditGradients, Precision, divide_gradients


class Gradients:
    """Steps optimizers on every `aggregation`-th batch."""

    def __init__(self, aggregation: int) -> None:
        self.aggregation = aggregation
        self.micro_batches = 1
        """The parts in which each rank trains a batch."""
        self.ends_batch = True
        """Whether the part in training is the last one of its batch."""
        self.precision = Precision()
        self.averages: dict[Optimizer, bool] = {}
        """The wrapped optimizers, and whether they average their aggregated gradients or leave them summed."""
        self.before_first_step: Callable[[], None] | None = None
        """Called once, before the first step."""
        self.exchanges: Mapping[Optimizer, Callable[[], None]] = {}
        """Functions to call before an optimizer steps: they average gradients of its free parameters over ranks."""
        self.zeroes_in_place = False
        """Whether gradients are zeroed in place instead of dropped."""

    def step(
        self,
        optimizer: Optimizer,
        clip_grads: EditGradients | None,
        auto_zero_grads: bool,
        scaler: GradScaler | None,
        batch_idx: Callable[[], int],
    ) -> None:
        """Step an optimizer if this batch ends an aggregation."""
        if optimizer not in self.averages:
            raise errors.InvalidExperimentException(
                f"step_optimizer() got an optimizer that is not wrapped ({type(optimizer).__name__}); "
                "pass what context.wrap_optimizer() returned."
            )
        edit = clip_grads
        if self.aggregation > 1 or self.micro_batches > 1:  # `accumulates`, without a call in each batch
            if not auto_zero_grads:
                raise errors.InvalidExperimentException(self._refusal())
            if not self.steps_at(batch_idx()):
                return
            summed = self.micro_batches * (self.aggregation if self.averages[optimizer] else 1)
            if summed > 1:
                edit = self._average_then(clip_grads, summed)
        if self.before_first_step is not None:
            self.before_first_step()
            self.before_first_step = None
        if optimizer in self.exchanges:
            self.exchanges[optimizer]()
        self.precision.step(optimizer, edit, scaler)
        if auto_zero_grads:
            self.precision.zero_grad(optimizer, self.zeroes_in_place)

    @property
    def accumulates(self) -> bool:
        """Whether a step takes several backward passes."""
        return self.aggregation > 1 or self.micro_batches > 1

    def steps_at(self, batch_idx: int) -> bool:
        """Return whether optimizers step in this part of a batch."""
        return self.ends_batch and (batch_idx + 1) % self.aggregation == 0

    def drop_part(self) -> None:
        """Drop the gradients of a batch that is left in the middle; those of earlier batches cannot be told apart."""
        for optimizer in self.averages if self.aggregation == 1 else ():
            self.precision.zero_grad(optimizer, self.zeroes_in_place)

    def _refusal(self) -> str:
        cause, remedy = f"aggregation_frequency={self.aggregation}", "Leave it at True."
        if self.aggregation == 1:
            cause = f"batches that each rank trains in {self.micro_batches} parts, to keep their size with fewer ranks"
            remedy = "Leave it at True, or pass batch_size=context.get_per_slot_batch_size() to the loader."
        return (
            f"step_optimizer(auto_zero_grads=False) does not work with {cause}: gradients are zeroed after each "
            f"aggregated step. {remedy}"
        )

    def _average_then(self, clip_grads: EditGradients | None, count: int) -> EditGradients:
        def edit(parameters: list[nn.Parameter]) -> None:
            divide_gradients(parameters, count)
            if clip_grads is not None:
                clip_grads(parameters)

        return edit
