"""Runs of scripts and trial classes in real processes, for tests."""

from __future__ import annotations

import json
import os
import pathlib
import textwrap
import time
from typing import Any

import psutil

import determined as det
from determined import tracking
from determined.experiment.executors import Executor, LogLine, RunExit, RunSpec, read_logs
from managed import record_trial

PATIENCE = 60.0
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
SOURCES = pathlib.Path(det.__file__).parents[1]
CONFIG = {"name": "test", "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 2}}}

TRIAL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import determined as det
from determined import pytorch


class Trial(pytorch.PyTorchTrial):
    loader = {}

    def __init__(self, context):
        self.context = context
        self.begin()
        self.model = context.wrap_model(nn.Linear(2, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def begin(self):
        pass

    def build_training_data_loader(self, **options):
        x = torch.ones(8, 2)
        return pytorch.DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, **(options or self.loader))

    def build_validation_data_loader(self):
        return self.build_training_data_loader(num_workers=0)

    def train_batch(self, batch, epoch_idx, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        x, y = batch
        return {"validation_loss": nn.functional.mse_loss(self.model(x), y)}
"""


class Runs:
    """Makes runs of one program, each of a trial of its own, and looks at what they leave."""

    def __init__(self, folder: pathlib.Path, executor: Executor) -> None:
        self.folder = folder
        self.executor = executor
        self.code = folder / "code"
        self.code.mkdir()
        self.going: set[int] = set()
        self._ended: dict[int, RunExit] = {}
        self._numbers = iter(range(1, 100))

    def write(self, text: str, name: str = "model_def.py") -> None:
        """Write a file of the program."""
        path = self.code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")

    def spec(self, entrypoint: Any, *, environment: dict[str, str] | None = None, **changes: Any) -> RunSpec:
        """Return a run of a script."""
        trial = changes.pop("trial_id", None) or next(self._numbers)
        run = changes.pop("run_id", 1)
        return RunSpec(
            experiment_id=1,
            trial_id=trial,
            run_id=run,
            entrypoint=entrypoint,
            code=changes.pop("code", self.code),
            folder=self.folder / f"trial-{trial}" / f"run-{run}",
            environment={"DET_HOME": str(self.folder / "det-home"), **(environment or {})},
            **{"grace_period": PATIENCE, **changes},
        )

    def trial(
        self, entrypoint: Any = "model_def:Trial", *, config: dict[str, Any] | None = None, **changes: Any
    ) -> RunSpec:
        """Return a run of a trial that is on record."""
        config, hparams = CONFIG | (config or {}), changes.pop("hparams", {})
        slots, latest = changes.pop("slot_ids", [0]), changes.pop("latest_checkpoint", None)
        trial_id = changes.pop("trial_id", None) or self._record(config, hparams)
        trial = det.TrialInfo(trial_id=trial_id, experiment_id=trial_id, trial_seed=7, hparams=hparams, _config=config)
        info = det.ClusterInfo(trial=trial, slot_ids=slots, latest_checkpoint=latest)
        environment = info.to_environment() | changes.pop("environment", {})
        return self.spec(entrypoint, trial_id=trial_id, environment=environment, **changes)

    def records(self) -> tracking.TrackingReader:
        """Return the records of trials."""
        return tracking.TrackingReader(self.folder / "det-home" / "tracking.db")

    def start(self, spec: RunSpec) -> RunSpec:
        """Begin a run."""
        self.going.add(spec.trial_id)
        self.executor.start(spec)
        return spec

    def kill_all(self) -> None:
        """End what a test has left."""
        for trial_id in self.going:
            self.executor.kill(trial_id)
        deadline = time.monotonic() + PATIENCE
        while self.going and time.monotonic() < deadline:
            self.collect(1.0)
        await_none(self.folder)

    def collect(self, timeout: float) -> None:
        """Take note of ends."""
        for ended in self.executor.poll(timeout):
            self.going.discard(ended.trial_id)
            self._ended[ended.trial_id] = ended

    def end(self, spec: RunSpec) -> RunExit:
        """Wait for the end of a run."""
        deadline = time.monotonic() + PATIENCE
        while spec.trial_id not in self._ended:
            assert time.monotonic() < deadline, f"run goes on:\n{self.text(spec)}"
            self.collect(1.0)
        return self._ended.pop(spec.trial_id)

    def run(self, spec: RunSpec) -> RunExit:
        """Run to the end."""
        return self.end(self.start(spec))

    def lines(self, spec: RunSpec) -> list[LogLine]:
        """Return what a trial has written so far."""
        return list(read_logs(spec.folder.parent))

    def text(self, spec: RunSpec) -> str:
        """Return what a trial has written so far, as it would be on a screen."""
        return "".join(f"{line.text}\n" for line in self.lines(spec))

    def await_text(self, spec: RunSpec, text: str) -> None:
        """Wait until a trial has written a text."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.text(spec):
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{self.text(spec)}"
            self.collect(0.01)

    def shim(self, spec: RunSpec) -> psutil.Process:
        """Return the shim of a run."""
        return psutil.Process(json.loads(spec.files.shim.read_text())["pid"])

    def rank(self, spec: RunSpec, number: int = 0) -> psutil.Process:
        """Return a rank of a run."""
        return sorted(self.shim(spec).children(), key=lambda child: child.pid)[number]

    def server(self, spec: RunSpec) -> psutil.Process:
        """Return the process that a run's shim was forked from."""
        return self.shim(spec).parent()

    def _record(self, config: dict[str, Any], hparams: dict[str, Any]) -> int:
        trial = record_trial(self.folder / "det-home" / "tracking.db", config, hparams)
        assert trial.trial_id == trial.experiment_id
        return trial.trial_id


def members(folder: pathlib.Path) -> list[psutil.Process]:
    """Return the processes of runs below a folder: those of a shim's session, and those with a run's environment."""
    sessions = {json.loads(path.read_text())["pid"] for path in folder.rglob("shim.json")}
    return [process for process in psutil.process_iter() if _is_member(process, sessions, str(folder))]


def _is_member(process: psutil.Process, sessions: set[int], folder: str) -> bool:
    try:
        if process.status() in ENDED:
            return False
        return os.getsid(process.pid) in sessions or process.environ().get("DET_RUN_FOLDER", "").startswith(folder)
    except (psutil.Error, ProcessLookupError, PermissionError):
        return False


def await_none(folder: pathlib.Path, timeout: float = 20.0) -> None:
    """Wait until nothing is left of the runs below a folder."""
    deadline = time.monotonic() + timeout
    while left := members(folder):
        if time.monotonic() > deadline:
            shown = [(process.pid, process.cmdline()) for process in left]
            for process in left:
                process.kill()
            raise AssertionError(f"left behind: {shown}")
        time.sleep(0.01)


def environment(home: pathlib.Path) -> dict[str, str]:
    """Return that of an executor of tests."""
    return {**os.environ, "HOME": str(home), "PYTHONPATH": str(SOURCES), "DET_PROGRESS": "0"}


def lives(pid: int) -> bool:
    """Say whether there is such a process, and it has not ended."""
    try:
        return psutil.Process(pid).status() not in ENDED  # and is not waited for yet
    except psutil.NoSuchProcess:
        return False
