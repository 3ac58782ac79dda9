"""Experiments whose trials do as they are told, run within the test's own process."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from determined._home import home
from determined.experiment import config as configs
from determined.experiment import create, drive
from determined.experiment.executors import InlineExecutor
from determined.tracking import CheckpointState, ExperimentStore, RunState, TrackingReader

PROGRAM = '''
import json
import pathlib

import torch
from torch import nn

from determined import pytorch


class Told(pytorch.PyTorchTrial):
    """Its weight tells the batches behind it, its validation losses are told, and it fails while it is told to.

    The weight grows by 1, 1.5, 1.75, ...: from one batch to the next, the momentum of the optimizer is halved.
    """

    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1, bias=False))
        nn.init.zeros_(self.model.weight)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5))

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 1)), batch_size=1)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.ones(1, 1)), batch_size=1)

    def train_batch(self, batch, epoch_idx, batch_idx):
        self._fail_if_told(batch_idx)
        loss = -self.model(batch[0]).sum()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def _fail_if_told(self, batch_idx):
        told = self.context.get_data_config().get("told")
        if told and pathlib.Path(told).exists() and batch_idx == json.loads(pathlib.Path(told).read_text()):
            raise RuntimeError(f"told to fail at batch {batch_idx}")

    def evaluate_full_dataset(self, data_loader):
        steps = self.context.current_train_batch() + 1
        losses = self.context.get_hparams().get("losses") or [1.0]
        return {"validation_loss": float(losses[min(steps, len(losses)) - 1]), "weight": self.model.weight.item()}
'''


def settings(batches: int = 4, **changes: Any) -> dict[str, Any]:
    """Return the config of a trial that validates and saves after each batch, with changes."""
    return {
        "name": "told",
        "entrypoint": "program:Told",
        "hyperparameters": {"global_batch_size": 1, **changes.pop("hyperparameters", {})},
        "searcher": {
            "name": "single",
            "metric": "validation_loss",
            "max_length": {"batches": batches},
            **changes.pop("searcher", {}),
        },
        "min_validation_period": {"batches": 1},
        "min_checkpoint_period": {"batches": 1},
        "reproducibility": {"experiment_seed": 3},
        **changes,
    }


KEEP_ALL = {"checkpoint_storage": {"save_trial_latest": 100}}
KEEP_NONE = [f"checkpoint_storage.save_{what}=0" for what in ("experiment_best", "trial_best", "trial_latest")]


class Workshop:
    """Experiments in the home folder of a test."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.home = home()
        self.code = folder / "code"
        self.code.mkdir(parents=True)
        (self.code / "program.py").write_text(PROGRAM)
        self.told = folder / "told.json"

    def create(self, config: Mapping[str, Any], **options: Any) -> int:
        """Create an experiment and leave it to somebody to drive it."""
        return create(configs.from_map(config), self.code, at=self.home, **options)

    def drive(self, id: int) -> RunState:
        """Drive an experiment to its end."""
        executor = InlineExecutor()
        try:
            return drive(id, self.home, executor)
        finally:
            executor.close()

    def run(self, config: Mapping[str, Any]) -> int:
        """Create an experiment and drive it to its end."""
        id = self.create(config)
        self.drive(id)
        return id

    @property
    def records(self) -> TrackingReader:
        """The record."""
        return TrackingReader(self.home.database)

    def kept(self, id: int) -> list[int]:
        """Return the steps of an experiment's checkpoints that are there, on record and as files."""
        completed = [one for one in self.records.checkpoints(id) if one.state is CheckpointState.COMPLETED]
        there = [one for one in self.records.checkpoints(id) if pathlib.Path(one.path).is_dir()]
        assert completed == there
        return [one.steps_completed for one in completed]

    def checkpoint(self, id: int, steps: int) -> str:
        """Return the id of the newest checkpoint of an experiment after so many steps."""
        return [one.uuid for one in self.records.checkpoints(id) if one.steps_completed == steps][-1]

    def starts(self, id: int) -> list[int]:
        """Return the steps from which the runs of the only trial of an experiment started."""
        with ExperimentStore.open(self.home.database, id) as store:
            (trial,) = store.trials()
            return [run.started_from_step for run in store.runs(trial.id)]

    def values(self, id: int, metric: str, group: str = "validation") -> list[Any]:
        """Return the values that the only trial of an experiment reported of a metric."""
        (trial,) = self.records.trials(id)
        return [report.metrics[metric] for report in self.records.metrics(trial.id, group)]


def losses(*values: float | str) -> dict[str, Sequence[float | str]]:
    """Return hyperparameters that tell the validation losses after 1, 2, ... batches."""
    return {"losses": list(values)}
