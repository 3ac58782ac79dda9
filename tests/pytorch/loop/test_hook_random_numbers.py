"""Random numbers that hooks draw leave training exact: interrupted or not, and when it is made longer later."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from determined import pytorch
from determined.pytorch import Batch
from exactness import ExactTrial, Outcome, check_exact, run
from trials import latest_checkpoint

HOOKS = [name for name in vars(pytorch.PyTorchCallback) if name.startswith("on_") and name != "on_checkpoint_end"]


def draw() -> float:
    """Draw from Python, NumPy and torch."""
    return random.random() + float(np.random.rand()) + torch.rand(1).item()


class Drawer(pytorch.PyTorchCallback):
    """Draws in every hook."""


def drawing() -> Callable[..., None]:
    def hook(*_: Any) -> None:
        draw()

    return hook


for name in HOOKS:
    setattr(Drawer, name, drawing())


class DrawingTrial(ExactTrial):
    """Draws wherever a trial can, and asks to stop where a test says so."""

    stops_at = -1

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {**super().build_callbacks(), "drawer": Drawer()}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == self.stops_at:
            self.context.set_stop_requested(True)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch) + draw()}


COURSE: dict[str, Any] = {"validation_period": Batch(4), "checkpoint_policy": "all", "step_zero_validation": True}


def test_a_run_goes_on_exactly_from_checkpoints_in_all_places() -> None:
    # In the middle of an epoch, with a validation, at the end of an epoch.
    check_exact(DrawingTrial, [1, 4, 6], **COURSE)


def check_same_training(resumed: Outcome, whole: Outcome, stop: int) -> None:
    """Check all but the windows of metrics, which end where a run does."""
    assert resumed.log == whole.log[stop:]
    assert weights_and_generators(resumed) == weights_and_generators(whole)


def weights_and_generators(outcome: Outcome) -> Any:
    models, optimizers, _, _, generators = outcome.state
    return models, optimizers, generators


def test_a_run_that_was_stopped_goes_on_exactly() -> None:
    whole = run(DrawingTrial, **COURSE)
    for stop in (2, 4):  # within a window, and where a validation is due
        stopping = type("Stopping", (DrawingTrial,), {"stops_at": stop - 1})
        run(stopping, **COURSE)
        resumed = run(DrawingTrial, latest_checkpoint=latest_checkpoint(), **COURSE)
        check_same_training(resumed, whole, stop)


def test_a_run_that_is_made_longer_is_like_one_that_was_as_long_from_the_start() -> None:
    whole = run(DrawingTrial, **COURSE)
    for length in (5, 8):  # nothing is due after 5 batches; a validation is after 8
        short = run(DrawingTrial, max_length=Batch(length), **COURSE)
        longer = run(DrawingTrial, latest_checkpoint=short.checkpoints[length], **COURSE)
        check_same_training(longer, whole, length)


def test_runs_of_one_seed_are_alike_however_long_their_checkpoints_take() -> None:
    fit: dict[str, Any] = {"max_length": Batch(4), "checkpoint_period": Batch(1)}
    first, *others = (run(DrawingTrial, **fit) for _ in range(5))
    assert all(other.state == first.state for other in others)
