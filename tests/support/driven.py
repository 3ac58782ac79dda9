"""Real experiments of tiny trials, driven by real processes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from determined._home import Home
from determined.experiment import config as configs
from determined.experiment import control, create
from determined.tracking import ExperimentStore, RunState, TrackingReader

MARK = "DET_FORKSERVER"
"""What all processes carry that were forked from one forkserver."""

PROGRAM = '''
import os
import pathlib
import time

import torch
from torch import nn

import determined as det
from determined import pytorch


class Quick(pytorch.PyTorchTrial):
    """Learns y = 2x from eight samples; slow, failing or picky if its hyperparameters say so.

    One that `hurries_after` is slow until a file with that path is there.
    """

    def __init__(self, context):
        self.context = context
        if context.get_hparams().get("invalid"):
            raise det.InvalidHP("it was told to be")
        torch.manual_seed(context.get_trial_seed())
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))

    def build_training_data_loader(self):
        x = torch.arange(8.0).reshape(8, 1) / 8
        return pytorch.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=2, shuffle=True)

    def build_validation_data_loader(self):
        x = torch.arange(4.0).reshape(4, 1)
        return pytorch.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=4)

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def train_batch(self, batch, epoch_idx, batch_idx):
        hparams = self.context.get_hparams()
        if not os.path.exists(hparams.get("hurries_after", "")):
            time.sleep(hparams.get("seconds", 0.0))
        if batch_idx == hparams.get("fails_at"):
            print("something went wrong")
            raise RuntimeError(f"batch {batch_idx} is a bad one")
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": self.loss(batch), "moment": torch.tensor(time.time(), dtype=torch.float64)}
'''


def config(**changes: Any) -> dict[str, Any]:
    """Return the config of one quick trial, with changes; `hyperparameters` are added to its own."""
    hyperparameters = {"global_batch_size": 2, "lr": 0.1, **changes.pop("hyperparameters", {})}
    return {
        "name": "quick",
        "entrypoint": "program:Quick",
        "hyperparameters": hyperparameters,
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 8}},
        "min_validation_period": {"batches": 2},
        "min_checkpoint_period": {"batches": 2},
        "reproducibility": {"experiment_seed": 3},
        **changes,
    }


class Experiments:
    """Experiments in a home folder of their own."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.home = Home(folder / "home", os.environ.get("DET_DATABASE"))
        self.code = folder / "code"
        self.code.mkdir(parents=True)
        (self.code / "program.py").write_text(PROGRAM)
        self._tokens: set[str] = set()

    def create(
        self, settings: Mapping[str, Any], slots: int | None = 1, starts: bool = True, on: str | None = None
    ) -> int:
        """Create an experiment, and have it driven."""
        slots = slots if on is None else None
        id = create(configs.from_map(settings), self.code, at=self.home, slots=slots, on=on)
        if starts:
            control.activate(id, self.home, slots)
        return id

    def run(self, settings: Mapping[str, Any], slots: int = 1, timeout: float = 120, on: str | None = None) -> int:
        """Run an experiment to its end."""
        id = self.create(settings, slots, on=on)
        control.wait(id, timeout, self.home)
        return id

    def store(self, id: int) -> ExperimentStore:
        return ExperimentStore.open(self.home.database, id)

    @property
    def records(self) -> TrackingReader:
        return TrackingReader(self.home.database)

    def state(self, id: int) -> RunState:
        return self.records.experiment(id).state

    def runner(self, id: int) -> psutil.Process:
        """Return the process that drives an experiment."""
        with self.store(id) as store:
            runner = store.runner()
        assert runner is not None
        return psutil.Process(runner.pid)

    def kill_runner(self, id: int) -> None:
        process = self.runner(id)
        self.processes()
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def processes(self) -> list[psutil.Process]:
        """Return all processes that work in this home folder: runners, and what comes from their forkservers.

        The latter are known by a mark, once they have been seen below a living runner.
        """
        marks = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marks[process] = process.environ()
        runners = [one for one, its in marks.items() if its.get("DET_HOME") == str(self.home.path)]
        below = {child.pid for runner in runners for child in _children(runner)}
        self._tokens |= {its[MARK] for one, its in marks.items() if one.pid in below and MARK in its}
        found = {*runners, *(one for one, its in marks.items() if its.get(MARK) in self._tokens)}
        return [one for one in found if one.pid != os.getpid() and _is_alive(one)]

    def outcome(self, id: int) -> list[Any]:
        """Return what must be the same however often an experiment was interrupted."""
        found = []
        with self.store(id) as store:
            for trial in store.trials():
                validations = self.records.metrics(trial.id, "validation")
                history = [(report.steps_completed, report.metrics["validation_loss"]) for report in validations]
                found.append((trial.request_id, dict(trial.hparams), trial.seed, trial.state, history))
        return found


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until a condition holds, and return what it gave."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come true in time")


@contextlib.contextmanager
def experiments(folder: pathlib.Path) -> Iterator[Experiments]:
    """Give experiments of which nothing is left running afterwards."""
    made = Experiments(folder)
    try:
        yield made
    finally:
        for process in made.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
