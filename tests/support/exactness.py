"""A trial that uses every source of randomness, and what comparing two of its runs bit for bit needs."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from determined import pytorch, tracking
from determined.pytorch import Batch
from trials import LineTrial, line_data, trainer

LENGTH = 13
"""Batches of a whole run: two epochs of six, and one batch."""


class Samples(Dataset[Any]):
    """Numbered samples, with noise from all three generators if asked for."""

    def __init__(self, size: int = 22, noise: bool = False) -> None:
        self.x, self.y = line_data(size).tensors
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        shift = torch.rand(4) * random.random() + np.random.rand() if self.noise else torch.zeros(4)
        return index, self.x[index] + shift.float(), self.y[index]


class Memory(pytorch.PyTorchCallback):
    """Counts in its state and notes the epochs that begin and end."""

    def __init__(self) -> None:
        self.batches = 0
        self.losses = np.zeros(0)
        self.events: list[tuple[str, int]] = []

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.events.append(("start", epoch_idx))

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.events.append(("end", epoch_idx))

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self.batches += len(batch_metrics)
        self.losses = np.append(self.losses, avg_metrics["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.losses = state["batches"], state["losses"]


class ExactTrial(LineTrial):
    """Uses random numbers of every kind and notes all that it is given."""

    noise = True

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.memory = Memory()
        self.log: list[Any] = []

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"memory": self.memory}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(
            Samples(noise=self.noise), batch_size=4, shuffle=self.shuffle, num_workers=self.num_workers
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        index, x, y = batch
        drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
        self.log.append((epoch_idx, batch_idx, index.tolist(), x.tolist(), drawn))
        loss = self.loss((x, y)) * (1 + drawn[0])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss, "lr": self.optimizer.param_groups[0]["lr"]}


@dataclasses.dataclass
class Outcome:
    """All of a run that must come out the same."""

    log: list[Any]
    events: list[Any]
    state: Any
    metrics: list[tuple[str, int, Any]]
    checkpoints: dict[int, str]
    record: tracking.TrialRecord

    def after(self, batches: int) -> list[tuple[str, int, Any]]:
        """Return the reports of later batches than these."""
        return [report for report in self.metrics if report[1] > batches]


def plain(value: Any) -> Any:
    """Return nested state as values that compare exactly."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def run(trial_class: type[LineTrial], init: dict[str, Any] | None = None, **fit: Any) -> Outcome:
    """Train and return what came out."""
    defaults = {"max_length": Batch(LENGTH), "checkpoint_policy": "none", "reporting_period": Batch(4)}
    with trainer(trial_class, **(init or {})) as (its_trainer, trial):
        its_trainer.fit(**(defaults | fit))
        trial_id = trial.context.get_trial_id()
        state = [
            [model.state_dict() for model in trial.context.models],
            [optimizer.state_dict() for optimizer in trial.context.optimizers],
            [scheduler.state_dict() for scheduler in trial.context.lr_schedulers],
            trial.memory.state_dict(),
            [random.getstate(), list(np.random.get_state(legacy=True)), torch.get_rng_state()],
        ]
        state = plain(state)
    records = tracking.TrackingReader(pathlib.Path(os.environ["DET_HOME"]) / "tracking.db")
    reports = [(report.group, report.steps_completed, report.metrics) for report in records.metrics(trial_id)]
    checkpoints = {saved.steps_completed: saved.uuid for saved in records.checkpoints(trial_id=trial_id)}
    return Outcome(trial.log, trial.memory.events, state, reports, checkpoints, records.trial(trial_id))


def check_exact(
    trial_class: type[LineTrial], stops: list[int], init: dict[str, Any] | None = None, **fit: Any
) -> Outcome:
    """Check that going on from a checkpoint at each of `stops` gives what the whole run gave, and return that."""
    fit |= {"checkpoint_period": Batch(stops)}
    whole = run(trial_class, init, **fit)
    for stop in stops:
        torch.manual_seed(stop)  # nothing may depend on the state of this process
        resumed = run(trial_class, init, latest_checkpoint=whole.checkpoints[stop], **fit)
        check_same_end(resumed, whole, stop)
    return whole


def check_same_end(resumed: Outcome, whole: Outcome, stop: int) -> None:
    assert resumed.log == whole.log[stop:]
    assert resumed.state == whole.state
    assert resumed.metrics == whole.after(stop)
