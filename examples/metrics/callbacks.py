"""What happens around training: early stopping, a learning rate that follows the metric, pictures."""

from __future__ import annotations

import logging
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from determined import pytorch
from reducers import ConfusionMatrix

logger = logging.getLogger(__name__)


class EarlyStopping(pytorch.PyTorchCallback):
    """Asks for a stop after `patience` validations without a new best loss.

    Its state is saved in every checkpoint, so that a resumed run knows how long it has been waiting.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext, patience: int) -> None:
        self.context = context
        self.patience = patience
        self.best = float("inf")
        self.waited = 0

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.waited = 0 if metrics["validation_loss"] < self.best else self.waited + 1
        self.best = min(self.best, metrics["validation_loss"])
        if self.waited >= self.patience:
            logger.info("no better than %.4f for %d validations: stopping", self.best, self.waited)
            self.context.set_stop_requested(True)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.waited = state_dict["best"], state_dict["waited"]


class LowerLearningRate(pytorch.PyTorchCallback):
    """Steps a scheduler that needs to see the metric."""

    def __init__(self, scheduler: ReduceLROnPlateau) -> None:
        self.scheduler = scheduler

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.scheduler.step(metrics["validation_loss"])


class Pictures(pytorch.PyTorchCallback):
    """Draws the confusion matrix and the misread digits of every validation into TensorBoard."""

    def __init__(self, context: pytorch.PyTorchTrialContext, confusion: ConfusionMatrix) -> None:
        self.context = context
        self.confusion = confusion
        self.misread: list[torch.Tensor] = []

    def on_validation_start(self) -> None:
        self.misread = []

    def add_misread(self, images: torch.Tensor) -> None:
        """Keep images, shape (N, 1, 8, 8), for the next drawing. The trial calls this."""
        self.misread.append(images.cpu())

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if self.context.distributed.get_rank() > 0:
            return
        writer, step = self.context.get_tensorboard_writer(), self.context.current_train_batch()
        writer.add_figure("confusion matrix", draw_matrix(self.confusion.of_all_processes), step)
        if len(images := torch.cat(self.misread)):
            writer.add_images("misread digits", nn.functional.interpolate(images, scale_factor=8), step)


def draw_matrix(counts: torch.Tensor) -> Figure:
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.matshow(counts, cmap="Blues", vmax=2 * counts.max())  # no darker than the numbers can be read on
    axes.set(xlabel="taken for", ylabel="is", xticks=range(len(counts)), yticks=range(len(counts)))
    for row, column in counts.nonzero().tolist():
        axes.text(column, row, str(counts[row, column].item()), ha="center", va="center")
    return figure
