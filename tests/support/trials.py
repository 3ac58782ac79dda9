"""Small trials that several tests train."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from determined import pytorch, tracking
from determined._home import home
from determined.pytorch import Batch


def line_data(samples: int = 24) -> TensorDataset:
    """Return samples of y = sum(x), the same every time."""
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x.sum(1, keepdim=True))


class LineTrial(pytorch.PyTorchTrial):
    """Fits a linear model; the base of most trials in the tests. Override what a test is about."""

    samples = 24
    batch_size = 4
    shuffle = True
    num_workers = 0

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        torch.manual_seed(11)
        self.model = context.wrap_model(self.make_model())
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.05))
        self.seen: list[tuple[int, int]] = []

    def make_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(
            line_data(self.samples), batch_size=self.batch_size, shuffle=self.shuffle, num_workers=self.num_workers
        )

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(line_data(8), batch_size=4)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.seen.append((epoch_idx, batch_idx))
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch)}


class TemperatureTrial(LineTrial):
    """Divides what the model gives by a temperature, which is learned and belongs to no model."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        torch.manual_seed(11)
        self.model = context.wrap_model(self.make_model())
        self.temperature = self.make_temperature()
        groups = [{"params": self.model.parameters()}, {"params": [self.temperature], "lr": 0.1}]
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(groups, lr=0.05))
        self.seen = []

    def make_temperature(self) -> nn.Parameter:
        return nn.Parameter(torch.tensor(2.0))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x) / self.temperature, y)


SEED = {"reproducibility": {"experiment_seed": 5}}


@contextlib.contextmanager
def trainer(trial_class: type[pytorch.PyTorchTrial] = LineTrial, **init: Any) -> Iterator[tuple[pytorch.Trainer, Any]]:
    """Give (trainer, trial) of a seeded local run."""
    with pytorch.init(**{"exp_conf": SEED, **init}) as context:
        trial = trial_class(context)
        yield pytorch.Trainer(trial, context), trial


def fit(
    trial_class: type[pytorch.PyTorchTrial] = LineTrial, init: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    """Train a trial in a local run of its own and return it."""
    with trainer(trial_class, **(init or {})) as (its_trainer, trial):
        its_trainer.fit(**{"max_length": pytorch.Batch(6), "checkpoint_policy": "none", **arguments})
    return trial


def train_and_save(
    trial_class: type[pytorch.PyTorchTrial], batches: int, latest: pathlib.Path | None = None, **init: Any
) -> pathlib.Path:
    """Train to a number of batches, from a checkpoint if one is given, and return the folder of the one left."""
    folder = pathlib.Path(os.environ["DET_HOME"], "checkpoints")
    before = set(folder.glob("*"))
    fit(trial_class, init, max_length=pytorch.Batch(batches), latest_checkpoint=latest)
    (made,) = set(folder.glob("*")) - before
    return made


def state_in(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Return all that a checkpoint holds."""
    return dict(torch.load(checkpoint / "state_dict.pth", weights_only=True))


def assert_resumes_exactly(trial_class: type[pytorch.PyTorchTrial], stop: int, end: int, **init: Any) -> None:
    """Check that a run in two parts leaves the same checkpoint, bit for bit, as one without a break."""
    first = train_and_save(trial_class, stop, **init)
    in_parts = train_and_save(trial_class, end, first, **init)
    assert_same(state_in(in_parts), state_in(train_and_save(trial_class, end, **init)))


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare nested states bit for bit."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.layout == theirs.layout
        assert torch.equal(_bytes(ours), _bytes(theirs))
    else:
        assert ours == theirs


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def records() -> tracking.TrackingReader:
    """Return the record of all runs of this test."""
    return tracking.TrackingReader(home().database)


def steps_of(group: str, trial_id: int = 1) -> list[int]:
    """Return the batches after which metrics of a group were reported."""
    return [report.steps_completed for report in records().metrics(trial_id, group)]


def saved_at(trial_id: int = 1) -> list[int]:
    """Return the batches after which checkpoints were saved."""
    return [checkpoint.steps_completed for checkpoint in records().checkpoints(trial_id=trial_id)]


def latest_checkpoint() -> str:
    """Return the id of the checkpoint that was saved last."""
    return records().checkpoints()[-1].uuid


class ScriptedTrial(LineTrial):
    """Validations give the values of a list, one after another."""

    values: list[Any] = []
    name = "validation_loss"

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.validations = 0

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        value = self.values[self.validations]
        self.validations += 1
        return value if isinstance(value, dict) else {self.name: value}

    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch


def scripted(values: list[Any], **init: Any) -> Callable[..., list[int]]:
    """Returns a function that trains one batch for each value and returns the batches after which it saved."""

    class Trial(ScriptedTrial):
        pass

    Trial.values = values

    def run(**arguments: Any) -> list[int]:
        policy = {"checkpoint_policy": "best", "validation_period": Batch(1)}
        fit(Trial, init, max_length=Batch(len(values)), **(policy | arguments))
        return saved_at()

    return run
