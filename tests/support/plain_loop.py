"""What differential tests share: a trial that tells its metrics, and the same parts for a hand-written loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from determined import pytorch
from trials import LineTrial, assert_same, fit, line_data

BATCHES = 14  # two epochs of six batches and a part of the third
EPOCH = 6


class Journal(pytorch.PyTorchCallback):
    """Keeps every metric that was reported."""

    def __init__(self) -> None:
        self.training: list[dict[str, Any]] = []
        self.averages: list[dict[str, Any]] = []
        self.validation: list[dict[str, Any]] = []

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self.averages.append(avg_metrics)
        self.training += batch_metrics

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.validation.append(metrics)

    @property
    def losses(self) -> list[float]:
        return [metrics["loss"] for metrics in self.training]


class JournalTrial(LineTrial):
    """A trial whose optimizer and clipping a test chooses, and whose metrics it can read."""

    clip: Callable[[list[nn.Parameter]], object] | None = None
    average: bool | None = None

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.journal = Journal()
        torch.manual_seed(11)
        self.set_up()

    def set_up(self) -> None:
        self.model = self.context.wrap_model(self.make_model())
        optimizer = self.make_optimizer(self.model.parameters())
        self.optimizer = self.context.wrap_optimizer(optimizer, average_aggregated_gradients=self.average)

    def make_model(self) -> nn.Module:
        return small_net()

    def make_optimizer(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=type(self).clip)
        return {"loss": loss}

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"journal": self.journal}


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def training_batches(count: int = BATCHES) -> Iterator[Any]:
    """Yield what the trial is trained on: the loader's own order for the seed of the run."""
    loader = pytorch.DataLoader(line_data(24), batch_size=4, shuffle=True)
    return itertools.islice(loader.get_data_loader(repeat=True, seed=5), count)


def mse(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def train(trial_class: type[JournalTrial], **arguments: Any) -> Any:
    return fit(trial_class, **{"max_length": pytorch.Batch(BATCHES), **arguments})


def variant(base: type[JournalTrial] = JournalTrial, **attributes: Any) -> type[JournalTrial]:
    return type("Variant", (base,), attributes)


def assert_same_training(trial: Any, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    assert_same(trial.model.state_dict(), model.state_dict())
    assert_same(trial.optimizer.state_dict(), optimizer.state_dict())
    assert trial.journal.losses == losses
