"""Lightning, in the mode that it has for measuring its raw speed: nothing is logged, shown or saved."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from _worker import (
    critic_loss,
    generator_loss,
    loss_of,
    make_model,
    make_optimizer,
    training_loader,
    validation_loader,
    work,
)
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn


class Tiny(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.losses: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        return loss_of(self.model(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.losses.append(loss_of(self.model(x), y))


class TwoOptimizers(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.critic = make_model(outputs=1)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [make_optimizer(self.model), make_optimizer(self.critic)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer, critic_optimizer = self.optimizers()
        fake = self.model(x)
        self.manual_backward(generator_loss(self.critic, fake))
        optimizer.step()
        optimizer.zero_grad()
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss(self.critic, fake, y))
        critic_optimizer.step()


def trainer(**settings: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=1, barebones=True, **settings)


def train(batches: int, shuffle: bool) -> list[nn.Module]:
    module = Tiny()
    trainer(max_steps=batches, max_epochs=-1).fit(module, training_loader(shuffle))
    return [module.model]


def train_two(batches: int, shuffle: bool) -> list[nn.Module]:
    module = TwoOptimizers()
    trainer(max_steps=2 * batches, max_epochs=-1).fit(module, training_loader(shuffle))
    return [module.model, module.critic]


def validate(batches: int) -> float:
    module = Tiny()
    trainer().validate(module, validation_loader(batches), verbose=False)
    return torch.stack(module.losses).mean().item()


if __name__ == "__main__":
    work(versions={"lightning": lightning.__version__}, train=train, validate=validate, train_two=train_two)
