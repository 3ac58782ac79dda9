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
        if self.aggregation > 1:
            if not auto_zero_grads:
                raise errors.InvalidExperimentException(
                    f"step_optimizer(auto_zero_grads=False) does not work with aggregation_frequency="
                    f"{self.aggregation}: gradients are zeroed after each aggregated step. Leave it at True."
                )
            if (batch_idx() + 1) % self.aggregation:
                return
            if self.averages[optimizer]:
                edit = self._average_then(clip_grads)
        if self.before_first_step is not None:
            self.before_first_step()
            self.before_first_step = None
        if optimizer in self.exchanges:
            self.exchanges[optimizer]()
        self.precision.step(optimizer, edit, scaler)
        if auto_zero_grads:
            self.precision.zero_grad(optimizer, self.zeroes_in_place)

    def _average_then(self, clip_grads: EditGradients | None) -> EditGradients:
        def edit(parameters: list[nn.Parameter]) -> None:
            divide_gradients(parameters, self.aggregation)
            if clip_grads is not None:
                clip_grads(parameters)

        return edit
