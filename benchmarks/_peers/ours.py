"""Resolute, with the record, TensorBoard, the progress bar and a checkpoint at the end."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from _worker import (
    BATCH_SIZE,
    critic_loss,
    data,
    generator_loss,
    loss_of,
    make_model,
    make_optimizer,
    work,
)
from torch import nn

import determined
from determined import pytorch


class TinyTrial(pytorch.PyTorchTrial):
    validation_batches = 1
    shuffle = True

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(make_model())
        self.optimizer = context.wrap_optimizer(make_optimizer(self.model))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(), batch_size=BATCH_SIZE, shuffle=self.shuffle)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(self.validation_batches), batch_size=BATCH_SIZE)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        self.validated = Validated()
        return {"validated": self.validated}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        loss = loss_of(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        return {"validation_loss": loss_of(self.model(x), y)}


class Validated(pytorch.PyTorchCallback):
    """Keeps the metrics of the last validation."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics


class ValidatingTrial(TinyTrial):
    """Leaves its weights as they are, so that its validation is that of the others."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {"loss": 0.0}


class TwoOptimizersTrial(TinyTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.critic = context.wrap_model(make_model(outputs=1))
        self.critic_optimizer = context.wrap_optimizer(make_optimizer(self.critic))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        fake = self.model(x)
        loss = generator_loss(self.critic, fake)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.critic_optimizer.zero_grad()  # the loss of the generator went through the critic
        critic = critic_loss(self.critic, fake, y)
        self.context.backward(critic)
        self.context.step_optimizer(self.critic_optimizer, auto_zero_grads=False)
        return {"loss": loss, "critic_loss": critic}


def fit(kind: type[TinyTrial], batches: int, **settings: Any) -> TinyTrial:
    with pytorch.init() as context:
        trial: TinyTrial = type("Trial", (kind,), settings)(context)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(batches))
    return trial


def train(batches: int, shuffle: bool) -> list[nn.Module]:
    return [fit(TinyTrial, batches, shuffle=shuffle).model]


def train_two(batches: int, shuffle: bool) -> list[nn.Module]:
    trial = fit(TwoOptimizersTrial, batches, shuffle=shuffle)
    return [trial.model, trial.critic]


def validate(batches: int) -> float:
    return float(fit(ValidatingTrial, 1, validation_batches=batches).validated.metrics["validation_loss"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"DET_HOME": home, "DET_PROGRESS": "1"}
        work(versions={"resolute": determined.__version__}, train=train, validate=validate, train_two=train_two)
