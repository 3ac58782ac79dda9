"""A trial ends with the same bits as a plain PyTorch loop with the same seeds and data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from determined import pytorch
from plain_loop import EPOCH, JournalTrial, assert_same_training, mse, small_net, train, training_batches, variant
from trials import assert_same

Mode = pytorch.LRScheduler.StepMode


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_optimizer(name: str) -> None:
    make = OPTIMIZERS[name]
    trial = train(variant(make_optimizer=lambda self, parameters: make(parameters)))
    torch.manual_seed(11)
    model = small_net()
    optimizer = make(model.parameters())
    losses = []
    for batch in training_batches():
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_same_training(trial, model, optimizer, losses)


def test_averages_of_a_window() -> None:
    trial = train(JournalTrial, reporting_period=pytorch.Batch(5))
    windows = [trial.journal.losses[0:5], trial.journal.losses[5:10], trial.journal.losses[10:14]]
    assert [w["loss"] for w in trial.journal.averages] == [math.fsum(w) / len(w) for w in windows]


class Gan(JournalTrial):
    """Two models that take turns; the critic learns twice a batch, the maker once, in an order of its own."""

    def set_up(self) -> None:
        self.maker, self.critic = (self.context.wrap_model(model) for model in gan_models())
        optimizers = gan_optimizers(self.maker, self.critic)
        self.maker_optimizer, self.critic_optimizer = map(self.context.wrap_optimizer, optimizers)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        x, _ = batch
        for _ in range(2):
            critic_loss = critic_loss_of(self.maker, self.critic, x)
            self.context.backward(critic_loss)
            self.context.step_optimizer(self.critic_optimizer)
        self.maker_optimizer.zero_grad()
        maker_loss = -self.critic(self.maker(x)).mean()
        self.context.backward(maker_loss)
        self.context.step_optimizer(self.maker_optimizer)
        self.critic_optimizer.zero_grad()
        return {"loss": maker_loss, "critic_loss": critic_loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"score": self.critic(self.maker(batch[0])).mean()}


def gan_models() -> tuple[nn.Module, nn.Module]:
    return nn.Linear(4, 4), small_net()


def gan_optimizers(maker: nn.Module, critic: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.Adam(maker.parameters(), lr=0.01), torch.optim.RMSprop(critic.parameters(), lr=0.02)


def critic_loss_of(maker: nn.Module, critic: nn.Module, x: Tensor) -> Tensor:
    return critic(maker(x).detach()).mean() - critic(x).mean()


def test_two_optimizers_that_take_turns() -> None:
    trial = train(Gan)
    torch.manual_seed(11)
    maker, critic = gan_models()
    maker_optimizer, critic_optimizer = gan_optimizers(maker, critic)
    metrics = []
    for x, _ in training_batches():
        for _ in range(2):
            critic_optimizer.zero_grad()
            critic_loss = critic_loss_of(maker, critic, x)
            critic_loss.backward()
            critic_optimizer.step()
        maker_optimizer.zero_grad()
        maker_loss = -critic(maker(x)).mean()
        maker_loss.backward()
        maker_optimizer.step()
        metrics.append({"loss": maker_loss.item(), "critic_loss": critic_loss.item()})
    assert_same(trial.maker.state_dict(), maker.state_dict())
    assert_same(trial.critic.state_dict(), critic.state_dict())
    assert_same(trial.maker_optimizer.state_dict(), maker_optimizer.state_dict())
    assert_same(trial.critic_optimizer.state_dict(), critic_optimizer.state_dict())
    assert trial.journal.training == metrics


def clip_norm(parameters: Any) -> object:
    return nn.utils.clip_grad_norm_(parameters, 0.3)


def clip_value(parameters: Any) -> object:
    return nn.utils.clip_grad_value_(parameters, 0.1)


@pytest.mark.parametrize("clip", [None, clip_norm, clip_value])
@pytest.mark.parametrize(("aggregation", "average"), [(1, None), (2, None), (2, False), (3, True), (3, False)])
def test_aggregation_and_clipping(aggregation: int, average: bool | None, clip: Any) -> None:
    init = {"aggregation_frequency": aggregation}
    trial = train(variant(clip=clip and staticmethod(clip), average=average), init=init)
    torch.manual_seed(11)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number, batch in enumerate(training_batches(), start=1):
        loss = mse(model, batch)
        loss.backward()
        losses.append(loss.item())
        if number % aggregation:
            continue
        if average is not False:
            for parameter in model.parameters():
                parameter.grad /= aggregation
        if clip:
            clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    assert_same_training(trial, model, optimizer, losses)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert_same([parameter.grad for parameter in trial.model.parameters()], gradients)


class Scheduled(JournalTrial):
    mode = Mode.STEP_EVERY_BATCH
    frequency = 1

    def set_up(self) -> None:
        super().set_up()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scheduler = self.context.wrap_lr_scheduler(scheduler, self.mode, self.frequency)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        rate = self.optimizer.param_groups[0]["lr"]
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        if self.mode is Mode.MANUAL_STEP and batch_idx % 4 == 3:
            self.scheduler.step()
        return metrics | {"lr": rate}


def plain_steps(mode: Any, frequency: int, aggregation: int, number: int) -> int:
    """How often a hand-written loop steps its scheduler after batch `number`, counted from 1."""
    if mode is Mode.MANUAL_STEP:
        return int(number % 4 == 0)
    if number % aggregation:
        return 0
    if mode is Mode.STEP_EVERY_BATCH:
        return sum(earlier % frequency == 0 for earlier in range(number - aggregation + 1, number + 1))
    if mode is Mode.STEP_EVERY_OPTIMIZER_STEP:
        return int((number // aggregation) % frequency == 0)
    # The epochs that end before the optimizer steps again, which it does after batch number + aggregation.
    ends = [end for end in range(number, number + aggregation) if end % EPOCH == 0]
    return sum((end // EPOCH) % frequency == 0 for end in ends)


@pytest.mark.parametrize("aggregation", [1, 2, 4])
@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize("mode", Mode)
def test_learning_rates(mode: Any, frequency: int, aggregation: int) -> None:
    length = 20  # past the end of the third epoch
    trial = train(
        variant(Scheduled, mode=mode, frequency=frequency),
        max_length=pytorch.Batch(length),
        init={"aggregation_frequency": aggregation},
    )
    torch.manual_seed(11)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses, rates = [], []
    for number, batch in enumerate(training_batches(length), start=1):
        rates.append(optimizer.param_groups[0]["lr"])
        loss = mse(model, batch)
        loss.backward()
        losses.append(loss.item())
        if number % aggregation == 0:
            for parameter in model.parameters():
                parameter.grad /= aggregation
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(plain_steps(mode, frequency, aggregation, number)):
            scheduler.step()
    assert [metrics["lr"] for metrics in trial.journal.training] == rates
    assert_same_training(trial, model, optimizer, losses)
    assert_same(trial.scheduler.state_dict(), scheduler.state_dict())


class Amp(JournalTrial):
    dtype = torch.bfloat16

    def set_up(self) -> None:
        super().set_up()
        self.context.experimental.use_amp(dtype=self.dtype)


@pytest.mark.parametrize("aggregation", [1, 3])
def test_bfloat16_autocast(aggregation: int) -> None:
    trial = train(Amp, init={"aggregation_frequency": aggregation})
    torch.manual_seed(11)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number, (x, y) in enumerate(training_batches(), start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
        loss.backward()
        losses.append(loss.item())
        if number % aggregation == 0:
            for parameter in model.parameters():
                parameter.grad /= aggregation
            optimizer.step()
            optimizer.zero_grad()
    assert_same_training(trial, model, optimizer, losses)


@pytest.mark.parametrize("clip", [None, clip_norm])
@pytest.mark.parametrize("aggregation", [1, 3])
def test_float16_with_loss_scaling(aggregation: int, clip: Any) -> None:
    init = {"aggregation_frequency": aggregation}
    trial = train(variant(Amp, dtype=torch.float16, clip=clip and staticmethod(clip)), init=init)
    torch.manual_seed(11)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for number, (x, y) in enumerate(training_batches(), start=1):
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if number % aggregation == 0:
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                parameter.grad /= aggregation
            if clip:
                clip(list(model.parameters()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same_training(trial, model, optimizer, losses)
