"""The loop that people write by hand."""

from __future__ import annotations

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
from torch import nn


def train(batches: int, shuffle: bool) -> list[nn.Module]:
    model = make_model()
    optimizer = make_optimizer(model)
    loader = training_loader(shuffle)
    done = 0
    while True:
        for x, y in loader:
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == batches:
                return [model]


def train_two(batches: int, shuffle: bool) -> list[nn.Module]:
    generator, critic = make_model(), make_model(outputs=1)
    generator_optimizer, critic_optimizer = make_optimizer(generator), make_optimizer(critic)
    loader = training_loader(shuffle)
    done = 0
    while True:
        for x, y in loader:
            fake = generator(x)
            generator_loss(critic, fake).backward()
            generator_optimizer.step()
            generator_optimizer.zero_grad()
            critic_optimizer.zero_grad()  # the loss of the generator went through the critic
            critic_loss(critic, fake, y).backward()
            critic_optimizer.step()
            done += 1
            if done == batches:
                return [generator, critic]


def validate(batches: int) -> float:
    model = make_model().eval()
    losses = []
    with torch.no_grad():
        for x, y in validation_loader(batches):
            losses.append(loss_of(model(x), y))
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    work(versions={"torch": torch.__version__}, train=train, validate=validate, train_two=train_two)
