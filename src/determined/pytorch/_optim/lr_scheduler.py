"""LR schedulers, and when the loop steps them."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

from determined import errors
from determined.pytorch._loop.progress import Progress


class Mode(enum.Enum):
    """When a scheduler is stepped by the loop."""

    STEP_EVERY_EPOCH = 1
    STEP_EVERY_BATCH = 2
    MANUAL_STEP = 3
    STEP_EVERY_OPTIMIZER_STEP = 4


class LRScheduler:
    """A torch scheduler and when the loop steps it.

    With `frequency=n` it steps on every n-th epoch, batch or optimizer step. With gradient aggregation it
    steps only on batches on which the optimizer steps.
    """

    StepMode = Mode

    def __init__(self, scheduler: Any, step_mode: Mode, frequency: int = 1) -> None:
        if not isinstance(step_mode, Mode):
            raise TypeError(
                f"step_mode={step_mode!r} is not a member of LRScheduler.StepMode; "
                "pass one such as LRScheduler.StepMode.STEP_EVERY_EPOCH."
            )
        if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
            raise ValueError(f"frequency={frequency!r} must be an int of at least 1; 1 steps every time.")
        if not callable(getattr(scheduler, "step", None)):
            raise TypeError(f"{scheduler!r} has no step(); pass a scheduler of torch.optim.lr_scheduler.")
        self._scheduler = scheduler
        self.step_mode = step_mode
        self.frequency = frequency

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler. With `MANUAL_STEP` the trial calls this."""
        self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the current learning rates, one per parameter group."""
        return list(self._scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the torch scheduler."""
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the torch scheduler."""
        self._scheduler.load_state_dict(state_dict)


def auto_steps(schedulers: list[LRScheduler], progress: Progress, aggregation: int) -> list[Callable[[], None]]:
    """Return what to call after each batch: a function for each scheduler that the loop steps."""
    for scheduler in schedulers:
        if scheduler.step_mode is Mode.STEP_EVERY_EPOCH and progress.epochs.length is None:
            raise errors.InvalidExperimentException(
                "A scheduler has the mode STEP_EVERY_EPOCH, but the training data has no length, so no epoch "
                "ends; wrap it with LRScheduler.StepMode.STEP_EVERY_BATCH and a frequency."
            )
    automatic = [scheduler for scheduler in schedulers if scheduler.step_mode is not Mode.MANUAL_STEP]
    return [functools.partial(_step_if_due, scheduler, progress, aggregation) for scheduler in automatic]


def _step_if_due(scheduler: LRScheduler, progress: Progress, aggregation: int) -> None:
    for _ in range(_steps_due(scheduler, progress, aggregation)):
        scheduler.step()


def _steps_due(scheduler: LRScheduler, progress: Progress, aggregation: int) -> int:
    """Return the number of steps due after the current batch: 0 unless the optimizer steps on it."""
    trained, every = progress.batch_idx + 1, scheduler.frequency
    if trained % aggregation:
        return 0
    if scheduler.step_mode is Mode.STEP_EVERY_BATCH:
        return trained // every - (trained - aggregation) // every
    if scheduler.step_mode is Mode.STEP_EVERY_OPTIMIZER_STEP:
        return int((trained // aggregation) % every == 0)
    # Epochs that end before the batch of the next optimizer step.
    ended = progress.epochs.of(progress.batch_idx + aggregation)
    return ended // every - progress.epochs.of(progress.batch_idx) // every
