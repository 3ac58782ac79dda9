"""A small training that uses everything whose state a checkpoint must hold, and prints a digest of how it ended."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from course import DIGEST, RunObservations
from torch import nn
from torch.utils.data import Dataset

from determined import pytorch, tracking
from determined.pytorch import Batch, LRScheduler


class Noisy(Dataset[Any]):
    """Samples of y = sum(x), with noise from the generators of torch, NumPy and Python."""

    def __init__(self, size: int, noise: float = 0.1) -> None:
        self.x = torch.randn(size, 6, generator=torch.Generator().manual_seed(3))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.rand(6) + float(np.random.rand()) + random.random()
        return self.x[index] + self.noise * drawn, self.x[index].sum(0, keepdim=True)


class LargestLoss(pytorch.MetricReducer):
    """The largest loss of a window."""

    def __init__(self) -> None:
        self.largest = 0.0

    def reset(self) -> None:
        self.largest = 0.0

    def update(self, loss: float) -> None:
        self.largest = max(self.largest, loss)

    def per_slot_reduce(self) -> float:
        return self.largest

    def cross_slot_reduce(self, per_slot_metrics: list[float]) -> float:
        return max(per_slot_metrics)


class Memory(pytorch.PyTorchCallback):
    """A callback that remembers, and draws random numbers of its own.

    Not in hooks that come after the write of a checkpoint, which would make training wait for it.
    """

    def __init__(self) -> None:
        self.windows = 0
        self.total = np.zeros(2)

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self.windows += 1
        self.total += [avg_metrics["first_loss"], random.random()]

    def on_training_start(self) -> None:
        np.random.rand()

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        torch.rand(1)

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self.windows, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.windows, self.total = state["windows"], state["total"]


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


class TortureTrial(pytorch.PyTorchTrial):
    """Two models, each with its optimizer and scheduler."""

    def __init__(self, context: pytorch.PyTorchTrialContext, workers: int, stop_at: int) -> None:
        self.context = context
        self.workers = workers
        self.stop_at = stop_at
        self.first, self.second = (context.wrap_model(small_model()) for _ in range(2))
        self.adam = context.wrap_optimizer(torch.optim.Adam(self.first.parameters(), lr=0.01))
        self.sgd = context.wrap_optimizer(torch.optim.SGD(self.second.parameters(), lr=0.01, momentum=0.9))
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.adam, T_max=RunObservations.length)
        step = torch.optim.lr_scheduler.StepLR(self.sgd, step_size=2, gamma=0.8)
        context.wrap_lr_scheduler(cosine, LRScheduler.StepMode.STEP_EVERY_BATCH)
        context.wrap_lr_scheduler(step, LRScheduler.StepMode.STEP_EVERY_EPOCH)
        self.mean = context.wrap_reducer(np.mean, name="mean_loss", for_validation=False)
        self.largest = context.wrap_reducer(LargestLoss(), name="largest_loss", for_validation=False)
        self.memory = Memory()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Noisy(96), batch_size=8, shuffle=True, num_workers=self.workers)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Noisy(16), batch_size=8)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"memory": self.memory}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == self.stop_at:
            signal.raise_signal(signal.SIGTERM)
        x, y = batch
        first = nn.functional.mse_loss(self.first(x), y)
        second = nn.functional.mse_loss(self.second(x), y) * (1 + 0.1 * random.random())
        for loss, optimizer in ((first, self.adam), (second, self.sgd)):
            self.context.backward(loss)
            self.context.step_optimizer(optimizer)
        self.mean.update(first.item())
        self.largest.update(second.item())
        return {"first_loss": first, "second_loss": second, "lr": self.adam.param_groups[0]["lr"]}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        return {"validation_loss": nn.functional.mse_loss(self.first(x), y) + np.random.rand()}


def digest(value: Any) -> str:
    """Return the SHA-256 of nested state, down to the last bit."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().numpy()
    if isinstance(value, np.ndarray):
        sha.update(f"{value.dtype}{value.shape}".encode())
        sha.update(value.tobytes())
    elif isinstance(value, dict):
        for key, one in value.items():
            sha.update(f"{key!r}:".encode())
            _feed(sha, one)
    elif isinstance(value, list | tuple):
        sha.update(f"[{len(value)}".encode())
        for one in value:
            _feed(sha, one)
    else:
        sha.update(f"{type(value).__name__}{value!r};".encode())


def states(trial: TortureTrial) -> dict[str, Any]:
    """Return all that must come out the same."""
    context = trial.context
    return {
        "models": [model.state_dict() for model in context.models],
        "gradients": [[p.grad for p in model.parameters()] for model in context.models],
        "optimizers": [optimizer.state_dict() for optimizer in context.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in context.lr_schedulers],
        "torch_rng": torch.get_rng_state(),
        "numpy_rng": list(np.random.get_state(legacy=True)),
        "python_rng": random.getstate(),
        "callback": trial.memory.state_dict(),
    }


def history(trial_id: int) -> list[tuple[str, int, Any]]:
    """Return what was reported in this run and those it continues, without the times."""
    records = tracking.TrackingReader(pathlib.Path(os.environ["DET_HOME"]) / "tracking.db")
    return [(report.group, report.steps_completed, report.metrics) for report in records.history(trial_id)]


def train(course: RunObservations, workers: int, aggregation: int, seed: int, stop_at: int) -> dict[str, str]:
    """Train to the end, from the newest checkpoint if there is one, and return the digests of what came out."""
    config = {"name": "torture", "reproducibility": {"experiment_seed": seed}}
    with pytorch.init(exp_conf=config, aggregation_frequency=aggregation) as context:
        trial = TortureTrial(context, workers, stop_at)
        pytorch.Trainer(trial, context).fit(
            max_length=Batch(course.length),
            reporting_period=Batch(course.reporting),
            validation_period=Batch(course.validation),
            checkpoint_period=Batch(course.checkpoint),
            checkpoint_policy=course.policy,
            latest_checkpoint="latest",
        )
        digests = {part: digest(state) for part, state in states(trial).items()}
        trial_id = context.get_trial_id()
    return digests | {"metrics": digest(history(trial_id))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parts = [field.name for field in dataclasses.fields(RunObservations)]
    options = dataclasses.asdict(RunObservations()) | {"workers": 0, "aggregation": 1, "seed": 1, "stop-at": -1}
    for option, default in options.items():
        parser.add_argument(f"--{option}", type=type(default), default=default)
    given = vars(parser.parse_args(arguments))
    torch.set_num_threads(1)
    digests = train(RunObservations(**{part: given.pop(part) for part in parts}), **given)
    print(DIGEST + json.dumps({"all": digest(digests), **digests}), flush=True)


if __name__ == "__main__":
    main()
