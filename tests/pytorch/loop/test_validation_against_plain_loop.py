"""Validations give what a plain PyTorch loop would compute, and leave its training as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from determined import pytorch
from plain_loop import BATCHES, Journal, JournalTrial, assert_same_training, mse, train, training_batches, variant
from trials import LineTrial, fit, line_data


def validation_batches() -> list[Any]:
    x, y = line_data(8).tensors
    return [(x[:4], y[:4]), (x[4:], y[4:])]


class Measured(JournalTrial):
    """Has metrics of several kinds, combined as the test says."""

    reducers: Any = pytorch.Reducer.AVG

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return measures(self.model, batch, batch_idx)

    def evaluation_reducer(self) -> Any:
        return self.reducers


def measures(model: nn.Module, batch: Any, index: int) -> dict[str, Any]:
    x, y = batch
    error = model(x) - y
    return {"tensor": error.square().mean(), "number": index + 0.5, "array": error.detach().double().numpy()[:3, 0]}


BY_HAND: dict[Any, Callable[[Any], Any]] = {
    pytorch.Reducer.AVG: np.mean,
    pytorch.Reducer.SUM: np.sum,
    pytorch.Reducer.MAX: np.max,
    pytorch.Reducer.MIN: np.min,
}


def measures_by_hand(trial: Any) -> list[dict[str, Any]]:
    trial.model.eval()
    with torch.no_grad():
        return [measures(trial.model, batch, index) for index, batch in enumerate(validation_batches())]


@pytest.mark.parametrize("reducer", pytorch.Reducer)
def test_one_reducer_for_all_metrics(reducer: pytorch.Reducer) -> None:
    trial = train(variant(Measured, reducers=reducer))
    first, second = measures_by_hand(trial)
    (reported,) = trial.journal.validation
    assert reported["number"] == BY_HAND[reducer]([0.5, 1.5])
    assert reported["tensor"] == BY_HAND[reducer]([first["tensor"].item(), second["tensor"].item()])
    assert reported["array"] == BY_HAND[reducer]([first["array"], second["array"]])


def test_a_reducer_for_each_metric() -> None:
    reducers = {"tensor": pytorch.Reducer.MAX, "number": pytorch.Reducer.SUM, "array": pytorch.Reducer.MIN}
    trial = train(variant(Measured, reducers=reducers))
    first, second = measures_by_hand(trial)
    (reported,) = trial.journal.validation
    assert reported["number"] == 2.0
    assert reported["tensor"] == max(first["tensor"].item(), second["tensor"].item())
    assert reported["array"] == min(first["array"].min(), second["array"].min())


class WholeSet(LineTrial):
    """Evaluates the whole data set at once."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.journal = Journal()
        self.state: tuple[bool, bool] | None = None

    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        self.state = self.model.training, torch.is_grad_enabled()
        x, y = (torch.cat(parts) for parts in zip(*data_loader, strict=True))
        return {"worst": (self.model(x) - y).abs().max(), "samples": len(x)}

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"journal": self.journal}


def test_a_whole_data_set_is_evaluated_once() -> None:
    trial = fit(WholeSet)
    x, y = line_data(8).tensors
    with torch.no_grad():
        worst = (trial.model(x) - y).abs().max().item()
    assert trial.journal.validation == [{"worst": worst, "samples": 8}]


def test_a_whole_data_set_is_evaluated_in_evaluation_mode_without_gradients() -> None:
    assert fit(WholeSet).state == (False, False)


def noisy_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 1))


def test_batch_norm_and_dropout_with_validations_in_between() -> None:
    trial = train(
        variant(make_model=lambda self: noisy_net()),
        validation_period=pytorch.Batch(4),
        step_zero_validation=True,
    )
    torch.manual_seed(11)
    model = noisy_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []
    validations = [plain_validation(model)]
    for number, batch in enumerate(training_batches(), start=1):
        model.train()
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number % 4 == 0 or number == BATCHES:
            validations.append(plain_validation(model))
    assert_same_training(trial, model, optimizer, losses)
    assert [metrics["validation_loss"] for metrics in trial.journal.validation] == validations


@torch.no_grad()
def plain_validation(model: nn.Module) -> float:
    model.eval()
    losses = [mse(model, batch).item() for batch in validation_batches()]
    return sum(losses) / len(losses)


def test_the_run_leaves_torch_where_the_plain_loop_leaves_it() -> None:
    train(variant(make_model=lambda self: noisy_net()), validation_period=pytorch.Batch(5))
    ours = torch.get_rng_state()
    torch.manual_seed(11)
    model = noisy_net()
    for batch in training_batches():
        mse(model, batch)
    assert torch.equal(ours, torch.get_rng_state())
