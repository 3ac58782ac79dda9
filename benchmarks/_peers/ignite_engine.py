"""Ignite: engines without handlers, around functions of one's own."""

from __future__ import annotations

from typing import Any

import ignite
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
from ignite.engine import Engine
from torch import nn


def train(batches: int, shuffle: bool) -> list[nn.Module]:
    model = make_model()
    optimizer = make_optimizer(model)

    def update(engine: Engine, batch: Any) -> None:
        x, y = batch
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Engine(update).run(training_loader(shuffle), max_iters=batches)
    return [model]


def train_two(batches: int, shuffle: bool) -> list[nn.Module]:
    generator, critic = make_model(), make_model(outputs=1)
    generator_optimizer, critic_optimizer = make_optimizer(generator), make_optimizer(critic)

    def update(engine: Engine, batch: Any) -> None:
        x, y = batch
        fake = generator(x)
        generator_loss(critic, fake).backward()
        generator_optimizer.step()
        generator_optimizer.zero_grad()
        critic_optimizer.zero_grad()
        critic_loss(critic, fake, y).backward()
        critic_optimizer.step()

    Engine(update).run(training_loader(shuffle), max_iters=batches)
    return [generator, critic]


def validate(batches: int) -> float:
    model = make_model().eval()
    losses = []

    def evaluate(engine: Engine, batch: Any) -> None:
        x, y = batch
        losses.append(loss_of(model(x), y))

    with torch.no_grad():
        Engine(evaluate).run(validation_loader(batches))
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    work(versions={"ignite": ignite.__version__}, train=train, validate=validate, train_two=train_two)
