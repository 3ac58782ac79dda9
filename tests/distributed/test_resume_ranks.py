"""Going on after a stop: the same bits with as many ranks, the same data with any number."""

from __future__ import annotations

import collections
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from cases import every
from determined import pytorch
from determined.pytorch import Batch
from trials import LineTrial, assert_same, fit, records, state_in

pytestmark = pytest.mark.process


class RandomTrial(LineTrial):
    """Draws from every source of randomness, so that any that is not restored shows."""

    samples = 44

    def make_model(self) -> nn.Module:
        # Of several layers, so that there are buckets of gradients to sum in another order.
        return nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 1))


class WorkerTrial(RandomTrial):
    num_workers = 2


def train(kind: type[LineTrial], batches: int, checkpoint: str | None, aggregation: int) -> dict[str, Any]:
    trial = fit(
        kind,
        init={"exp_conf": {"reproducibility": {"experiment_seed": 5}}, "aggregation_frequency": aggregation},
        max_length=Batch(batches),
        reporting_period=Batch(3),
        latest_checkpoint=checkpoint,
        checkpoint_policy="none",
    )
    return {"model": dict(trial.model.state_dict()), "optimizer": trial.optimizer.state_dict()}


def last_checkpoint(trial_id: int) -> Any:
    return records().checkpoints(trial_id=trial_id)[-1]


@pytest.mark.parametrize(
    ("size", "kind", "aggregation"),
    [
        pytest.param(2, RandomTrial, 1, id="2 ranks"),
        pytest.param(3, RandomTrial, 1, id="3 ranks", marks=pytest.mark.thorough),
        pytest.param(4, RandomTrial, 1, id="4 ranks", marks=pytest.mark.thorough),
        pytest.param(2, RandomTrial, 2, id="between aggregated steps"),
        pytest.param(2, WorkerTrial, 1, id="loader workers", marks=pytest.mark.thorough),
    ],
)
def test_resumed_ranks_end_with_the_same_bits(size: int, kind: type[LineTrial], aggregation: int) -> None:
    whole = ranks.run(train, size, kind, 9, None, aggregation)
    ranks.run(train, size, kind, 5, None, aggregation)
    resumed = ranks.run(train, size, kind, 9, last_checkpoint(2).uuid, aggregation)
    assert_same(resumed[0]["optimizer"], whole[0]["optimizer"])
    assert_same(resumed[0]["model"], whole[0]["model"])
    last, last_resumed = (records().metrics(trial, "training")[-1] for trial in (1, 3))
    assert (last_resumed.steps_completed, last_resumed.metrics) == (last.steps_completed, last.metrics)


def test_each_rank_draws_its_own_random_numbers() -> None:
    ranks.run(train, 2, RandomTrial, 2, None, 1)
    states = state_in(pathlib.Path(last_checkpoint(1).path))["rng_state"]
    assert not torch.equal(states[0]["cpu_rng_state"], states[1]["cpu_rng_state"])


# Another number of ranks

SAMPLES = 60


class IndexTrial(LineTrial):
    """Notes which samples it trains on."""

    size_of_batch = 0

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.samples_seen: list[list[int]] = []

    def build_training_data_loader(self) -> pytorch.DataLoader:
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True))
        size = self.size_of_batch or self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(data, batch_size=size, shuffle=True)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        indices, *rest = batch
        self.samples_seen.append(indices.tolist())
        return super().train_batch(rest, epoch_idx, batch_idx)


class FixedTrial(IndexTrial):
    size_of_batch = 3


def seen(kind: type[IndexTrial], batches: int, checkpoint: str | None) -> list[list[int]]:
    init = {"hparams": {"global_batch_size": 12}}
    return fit(  # type: ignore[no-any-return]
        kind, init=init, max_length=Batch(batches), latest_checkpoint=checkpoint, checkpoint_policy="none"
    ).samples_seen


def trained_on(size: int, *args: Any) -> list[int]:
    """Return the samples of all ranks, in the order of the data."""
    per_rank = ranks.run(seen, size, *args)
    return [index for parts in zip(*per_rank, strict=True) for part in parts for index in part]


@pytest.mark.parametrize("kind", every(2, [IndexTrial, FixedTrial]), ids=["global batch size", "fixed batch size"])
def test_other_number_of_ranks_goes_on_with_the_next_sample(kind: type[IndexTrial]) -> None:
    first = trained_on(2, kind, 3, None)
    second = trained_on(4, kind, 5, last_checkpoint(1).uuid)
    third = trained_on(1, kind, 9, last_checkpoint(2).uuid)
    used = collections.Counter(first + second + third)
    whole, rest = divmod(len(first + second + third), SAMPLES)
    assert set(used.values()) <= {whole, whole + 1}
    assert sum(count == whole + 1 for count in used.values()) == rest
    assert len(used) == SAMPLES or whole == 0
    single = [index for batch in seen(kind, 1000 // 12, None) for index in batch]
    assert first + second + third == single[: len(first + second + third)]


def test_unequal_batch_sizes_split_the_data_without_overlap() -> None:
    per_rank = ranks.run(seen_of_five, 2)  # of 5 samples, the ranks get 3 and 2
    samples = [index for rank in per_rank for batch in rank for index in batch]
    assert sorted(samples) == list(range(SAMPLES))
    assert {len(batch) for batch in per_rank[0]} == {3}
    assert {len(batch) for batch in per_rank[1]} == {2}


def seen_of_five() -> list[list[int]]:
    return fit(  # type: ignore[no-any-return]
        IndexTrial, init={"hparams": {"global_batch_size": 5}}, max_length=Batch(SAMPLES // 5), checkpoint_policy="none"
    ).samples_seen
