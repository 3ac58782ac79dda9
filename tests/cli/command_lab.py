"""Tiny experiments for the command line, of which nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil

from det_command import run_det
from determined import tracking

SCRIPT = """
import pathlib
import time

import determined as det
from determined import core

hparams = det.get_cluster_info().trial.hparams
with core.init() as context:
    for step in range(1, hparams["steps"] + 1):
        context.train.report_validation_metrics(step, {"loss": hparams["x"] / step, "epochs": step})
        print("step", step, "with x =", hparams["x"], flush=True)
        while hparams["go"] and not pathlib.Path(hparams["go"]).exists() and not context.preempt.should_preempt():
            time.sleep(0.02)
        if context.preempt.should_preempt():
            break
    if hparams["x"] < 0:
        raise ValueError("x is negative")
"""

TRIAL = """
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from determined import pytorch


class Line(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        if not isinstance(context, pytorch.CheckpointLoadContext):
            assert (os.environ["API_KEY"], os.environ["PIN"]) == ("hunter2", "30517")
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))
        print("learns with", context.get_hparam("lr"))

    def data(self):
        x = torch.arange(8.0).reshape(8, 1) / 8
        return pytorch.DataLoader(TensorDataset(x, 2 * x), batch_size=4)

    build_training_data_loader = build_validation_data_loader = data

    def loss(self, batch):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": self.loss(batch)}
"""

CLASS_CONFIG: dict[str, Any] = {
    "name": "lines",
    "entrypoint": "line:Line",
    "hyperparameters": {"lr": {"type": "log", "minval": -3, "maxval": -1}, "global_batch_size": 4},
    "searcher": {
        "name": "adaptive_asha",
        "metric": "validation_loss",
        "time_metric": "epochs",
        "max_time": 4,
        "max_trials": 4,
        "divisor": 2,
        "max_concurrent_trials": 2,
    },
    "min_validation_period": {"epochs": 1},
    "data": {"secrets": {"token": "hunter2"}},
    "environment": {"environment_variables": ["API_KEY=hunter2", "PIN=30517"]},
    "reproducibility": {"experiment_seed": 1},
}


class Lab:
    """A home folder, a program, and `det`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.code = folder / "code"
        self.code.mkdir(parents=True)
        (self.code / "train.py").write_text(SCRIPT)
        (self.code / "line.py").write_text(TRIAL)
        self.go = folder / "go"

    def det(self, *arguments: object, **options: Any) -> Any:
        """Run `det` in this process, with this home folder."""
        environment = {"DET_HOME": str(self.home)}
        return run_det(*arguments, env=environment, **options)

    def succeeds(self, *arguments: object) -> str:
        """Run `det`, which must not fail, and return what it printed."""
        result = self.det(*arguments)
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    def config(self, **changes: Any) -> pathlib.Path:
        """Write the config of one script that holds on until `go` is there, with changes, and return its path."""
        hparams = {"x": 1.0, "steps": 3, "go": str(self.go), **changes.pop("hyperparameters", {})}
        settings = {
            "name": "scripts",
            "entrypoint": [sys.executable, "train.py"],
            "hyperparameters": hparams,
            "searcher": {"name": "single", "metric": "loss"},
            "max_restarts": 0,
        }
        return self.write(settings | changes)

    def write(self, settings: dict[str, Any]) -> pathlib.Path:
        path = self.folder / "config.yaml"
        path.write_text(json.dumps(settings))  # which is YAML too
        return path

    def create(self, *options: object, **changes: Any) -> int:
        """Create an experiment and return its id."""
        self.succeeds("experiment", "create", self.config(**changes), self.code, *options)
        return self.records.experiments()[0].id

    @property
    def records(self) -> tracking.TrackingReader:
        return tracking.TrackingReader(os.environ.get("DET_DATABASE") or self.home / "tracking.db")

    def state(self, id: int) -> str:
        return self.records.experiment(id).state.value

    def await_reports(self, id: int) -> tracking.TrialRecord:
        """Wait until the first trial of an experiment has validated, and return it."""

        def reported() -> tracking.TrialRecord | None:
            trials = self.records.trials(id)
            return trials[0] if trials and trials[0].best_validation else None

        return eventually(reported)

    def processes(self) -> list[psutil.Process]:
        """Return what runs with this home folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = process.pid != os.getpid() and process.environ().get("DET_HOME") == str(self.home)
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


class Searched(NamedTuple):
    """A search that has run to its end: experiment 1, trials 1 to 4."""

    lab: Lab
    output: str
    """What `det experiment create --follow` printed."""


@contextlib.contextmanager
def lab(folder: pathlib.Path) -> Iterator[Lab]:
    """Give a lab in which nothing runs on afterwards."""
    made = Lab(folder)
    try:
        yield made
    finally:
        while processes := made.processes():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=10)


def eventually(condition: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Wait until a condition holds, and return what it gave."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come true in time")
