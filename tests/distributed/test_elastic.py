"""A training whose number of ranks changes: the same batches, and what they teach, as if it had not."""

from __future__ import annotations

import collections
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from determined import pytorch
from determined.pytorch import Batch
from trials import LineTrial, fit, records

pytestmark = pytest.mark.process

BATCHES = 12


class ElasticTrial(LineTrial):
    """Fits a small network; an epoch of 30 samples ends in the middle of a batch of all ranks."""

    samples = 30

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.prepare(context)

    def prepare(self, context: pytorch.PyTorchTrialContext) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class ShardedTrial(ElasticTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_fsdp()
        super().__init__(context)


class GlobalTrial(ElasticTrial):
    """Divides a global batch size by the ranks; an epoch is a whole number of batches."""

    samples = 40

    def build_training_data_loader(self) -> pytorch.DataLoader:
        self.batch_size = self.context.get_per_slot_batch_size()
        return super().build_training_data_loader()


class SummingTrial(ElasticTrial):
    """Sums aggregated gradients, and has a parameter outside of models."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.scale = nn.Parameter(torch.ones(1))
        super().__init__(context)

    def prepare(self, context: pytorch.PyTorchTrialContext) -> None:
        own = torch.optim.SGD([*self.model.parameters(), self.scale], lr=0.01)
        self.optimizer = context.wrap_optimizer(own, average_aggregated_gradients=False)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x) * self.scale, y)


def train(kind: type[LineTrial], until: int, checkpoint: str | None, aggregation: int) -> None:
    fit(
        kind,
        init={
            "exp_conf": {"reproducibility": {"experiment_seed": 5}},
            "hparams": {"global_batch_size": 8},
            "aggregation_frequency": aggregation,
        },
        max_length=Batch(until),
        reporting_period=Batch(1),
        latest_checkpoint=checkpoint,
        checkpoint_policy="none",
    )


def saved(trial_id: int) -> Any:
    return records().checkpoints(trial_id=trial_id)[-1]


def weights(kind: type[LineTrial], trial_id: int) -> Any:
    trial = pytorch.load_trial_from_checkpoint_path(saved(trial_id).path, trial_class=kind)
    return trial.model.state_dict()  # type: ignore[attr-defined]  # of this trial


@pytest.mark.parametrize(
    ("kind", "aggregation", "sizes"),
    [
        pytest.param(ElasticTrial, 1, [2, 1, 2], id="fixed batch size"),
        pytest.param(ElasticTrial, 3, [2, 1, 2], id="between aggregated steps"),
        pytest.param(SummingTrial, 3, [2, 1], id="summed gradients", marks=pytest.mark.thorough),
        pytest.param(GlobalTrial, 1, [2, 1, 4], id="global batch size", marks=pytest.mark.thorough),
        pytest.param(ShardedTrial, 3, [2, 1, 2], id="sharded models"),
        pytest.param(ElasticTrial, 1, [4, 2, 1, 4], id="4 ranks", marks=pytest.mark.thorough),
    ],
)
def test_the_training_is_the_same_as_with_the_same_ranks(
    kind: type[LineTrial], aggregation: int, sizes: list[int]
) -> None:
    ranks.run(train, sizes[0], kind, BATCHES, None, aggregation)
    stops = [4, 7, 10, BATCHES][-len(sizes) :]
    for part, (size, until) in enumerate(zip(sizes, stops, strict=True), start=1):
        ranks.run(train, size, kind, until, saved(part).uuid if part > 1 else None, aggregation)
    torch.testing.assert_close(weights(kind, len(sizes) + 1), weights(kind, 1), rtol=1e-4, atol=1e-5)
    expected = {one.steps_completed: one.metrics for one in records().metrics(1, "training")}
    for part in range(len(sizes)):
        for own in records().metrics(part + 2, "training"):
            assert own.metrics == pytest.approx(expected[own.steps_completed], rel=1e-3)


PROGRAM = """
import collections, json, pathlib, sys, torch
from determined import pytorch

class Indices(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        self.trained = collections.defaultdict(list)

    def build_training_data_loader(self):
        data = torch.utils.data.TensorDataset(torch.arange(60.0).reshape(-1, 1))
        return pytorch.DataLoader(data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.zeros(3, 1)), batch_size=1)

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.trained[epoch_idx] += [int(x) for x in batch[0].flatten()]
        if batch_idx == int(sys.argv[1]):
            self.context.set_stop_requested(True)
        loss = self.model(batch[0]).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": self.model(batch[0]).square().mean()}

with pytorch.init(hparams={"global_batch_size": 6}) as context:
    trial = Indices(context)
    pytorch.Trainer(trial, context).fit(max_length=pytorch.Epoch(2), latest_checkpoint="latest")
pathlib.Path(f"{sys.argv[1]}.{context.distributed.rank}.json").write_text(json.dumps(trial.trained))
"""


def test_torchrun_with_two_one_and_three_processes_trains_every_sample_once_per_epoch(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    for size, stop in ((2, 2), (1, 5), (3, 100)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        done = subprocess.run(
            [*command, "train.py", str(stop)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    epochs: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 6
    for file in files:
        for epoch, samples in json.loads(file.read_text()).items():
            epochs[epoch].update(samples)
    assert epochs == {"0": collections.Counter(range(60)), "1": collections.Counter(range(60))}
