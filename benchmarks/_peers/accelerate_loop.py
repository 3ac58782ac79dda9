"""Accelerate: a loop of one's own over what it prepares."""

from __future__ import annotations

import accelerate
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
from accelerate import Accelerator
from torch import nn


def train(batches: int, shuffle: bool) -> list[nn.Module]:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), training_loader(shuffle))
    done = 0
    while True:
        for x, y in loader:
            loss = loss_of(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == batches:
                return [model]


def train_two(batches: int, shuffle: bool) -> list[nn.Module]:
    accelerator = Accelerator(cpu=True)
    generator, critic = make_model(), make_model(outputs=1)
    generator, critic, generator_optimizer, critic_optimizer, loader = accelerator.prepare(
        generator, critic, make_optimizer(generator), make_optimizer(critic), training_loader(shuffle)
    )
    done = 0
    while True:
        for x, y in loader:
            fake = generator(x)
            accelerator.backward(generator_loss(critic, fake))
            generator_optimizer.step()
            generator_optimizer.zero_grad()
            critic_optimizer.zero_grad()
            accelerator.backward(critic_loss(critic, fake, y))
            critic_optimizer.step()
            done += 1
            if done == batches:
                return [generator, critic]


def validate(batches: int) -> float:
    model, loader = Accelerator(cpu=True).prepare(make_model(), validation_loader(batches))
    model.eval()
    losses = []
    with torch.no_grad():
        for x, y in loader:
            losses.append(loss_of(model(x), y))
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    work(versions={"accelerate": accelerate.__version__}, train=train, validate=validate, train_two=train_two)
