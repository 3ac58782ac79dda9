"""Several processes train one trial: the same weights and metrics as a plain loop over the same data."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from cases import every
from determined import pytorch
from determined.pytorch import Batch
from trials import TemperatureTrial, assert_same, fit, line_data, records

pytestmark = pytest.mark.process


def weights_after(batches: int, **init: Any) -> Any:
    trial = fit(max_length=Batch(batches), init=init)
    return {name: value.clone() for name, value in trial.model.state_dict().items()}


def global_batches(size: int, count: int) -> list[Any]:
    """Return, for each batch of all ranks, those of each rank."""
    loader = pytorch.DataLoader(line_data(), batch_size=4, shuffle=True).get_data_loader(repeat=True, seed=5)
    batches = iter(loader)
    return [[next(batches) for _ in range(size)] for _ in range(count)]


def plain_weights(size: int, count: int) -> dict[str, torch.Tensor]:
    """Train as one process on the mean of the losses of all ranks' batches."""
    torch.manual_seed(11)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for parts in global_batches(size, count):
        losses = [nn.functional.mse_loss(model(x), y) for x, y in parts]
        (sum(losses) / size).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("size", every(2, [2, 4]))
def test_ranks_train_what_one_process_would_on_all_their_batches(size: int) -> None:
    per_rank = ranks.run(weights_after, size, 5)
    for one in per_rank[1:]:
        assert_same(one, per_rank[0])
    for name, expected in plain_weights(size, 5).items():
        torch.testing.assert_close(per_rank[0][name], expected)


def test_metrics_are_those_of_all_ranks() -> None:
    ranks.run(weights_after, 2, 3)
    (training,) = records().metrics(1, "training")
    torch.manual_seed(11)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    seen = []
    for parts in global_batches(2, 3):
        losses = [nn.functional.mse_loss(model(x), y) for x, y in parts]
        seen += [loss.item() for loss in losses]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    assert training.metrics["loss"] == pytest.approx(sum(seen) / len(seen), rel=1e-6)


def plain_ddp(batches: int) -> Any:
    """Train by a plain DDP loop on the batches that this rank would get."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for parts in global_batches(size, batches):
        x, y = parts[rank]
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.clone() for name, value in model.module.state_dict().items()}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, losses)
    del model
    dist.destroy_process_group()
    return weights, sum(map(sum, gathered)) / (size * batches)


def test_two_ranks_end_with_the_bits_of_a_plain_ddp_loop() -> None:
    ours = ranks.run(weights_after, 2, 6)
    (expected, loss), _ = ranks.run(plain_ddp, 2, 6)
    assert_same(ours[0], expected)
    assert records().metrics(1, "training")[-1].metrics["loss"] == pytest.approx(loss, rel=1e-12)


class DifferentTemperatureTrial(TemperatureTrial):
    """Begins with another temperature on each rank; the chief's is 2."""

    def make_temperature(self) -> nn.Parameter:
        return nn.Parameter(torch.tensor(2.0 + int(os.environ["RANK"])))


def temperatures_in_one_and_in_parts() -> list[torch.Tensor]:
    init = {"aggregation_frequency": 2}
    in_one = fit(DifferentTemperatureTrial, init, max_length=Batch(6))
    fit(DifferentTemperatureTrial, init, max_length=Batch(3))
    in_parts = fit(DifferentTemperatureTrial, init, max_length=Batch(6), latest_checkpoint="latest")
    return [trial.temperature.detach() for trial in (in_one, in_parts)]


def plain_temperature(size: int, count: int, aggregation: int) -> torch.Tensor:
    """Train as one process on the mean of the losses of all ranks' batches."""
    torch.manual_seed(11)
    model, temperature = nn.Linear(4, 1), nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": [temperature], "lr": 0.1}], lr=0.05)
    for number, parts in enumerate(global_batches(size, count), 1):
        losses = [nn.functional.mse_loss(model(x) / temperature, y) for x, y in parts]
        (sum(losses) / size / aggregation).backward()  # type: ignore[union-attr]
        if number % aggregation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return temperature.detach()


def test_parameters_of_no_model_are_trained_by_all_ranks_and_resumed_exactly() -> None:
    first, second = ranks.run(temperatures_in_one_and_in_parts, 2)
    assert first == second
    assert first[0] == first[1]
    torch.testing.assert_close(first[0], plain_temperature(2, 6, 2))
