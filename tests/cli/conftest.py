from __future__ import annotations

import math
import os
import pathlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from command_lab import CLASS_CONFIG, Lab, Searched
from command_lab import lab as opened_lab

from det_command import run_det
from determined import tracking

HOSTILE = "bad\x1b[31m\a [red]name[/red]\n"


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("DET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def det(home: pathlib.Path) -> Callable[..., Any]:
    """Runs `det` with the arguments given, in this process."""

    def det(*arguments: object, **options: Any) -> Any:
        return run_det(*arguments, **options)

    return det


@pytest.fixture
def start(home: pathlib.Path) -> Callable[..., tracking.TrialWriter]:
    """Records a new run of this process in the home folder; fields can be replaced by keyword."""

    def start(**changes: Any) -> tracking.TrialWriter:
        fields: dict[str, Any] = {
            "name": "digits",
            "config": {"searcher": {"metric": "val_loss"}, "data": {"secrets": {"token": "hunter2"}}},
            "hparams": {"lr": 0.1},
            "seed": 4711,
            "entrypoint": "train.py",
            "torch_version": "2.6.0",
            "resolute_version": "0.1.0",
            "git_commit": "c0ffee",
            "pid": os.getpid(),
            "process_started": psutil.Process().create_time(),
            "host": socket.gethostname(),
        }
        return tracking.TrialWriter.start(home / "tracking.db", tracking.RunDescription(**(fields | changes)))

    return start


@pytest.fixture
def finished(start: Callable[..., tracking.TrialWriter], home: pathlib.Path) -> tracking.CheckpointSaved:
    """A completed run with metrics and one checkpoint, which is returned."""
    folder = home / "checkpoints" / "abcd-1"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"12345")
    checkpoint = tracking.CheckpointSaved(
        uuid="abcd-1",
        steps_completed=20,
        path=str(folder),
        metadata={"format": "pickle"},
        resources={"weights.bin": 5},
        time=20.0,
    )
    with start() as recorder:
        recorder.write(
            [
                _report(10, "training", loss=2.0, lr=0.1, batches=10),
                _report(20, "training", loss=1.0, lr=0.05, batches=20),
                _report(20, "validation", val_loss=1.5, accuracy=math.nan, note="fine"),
                checkpoint,
                tracking.StateChanged(state=tracking.RunState.COMPLETED, time=30.0),
            ]
        )
    return checkpoint


def _report(step: int, group: str, **metrics: Any) -> tracking.MetricReport:
    return tracking.MetricReport(group=group, steps_completed=step, metrics=metrics, time=float(step))


@pytest.fixture
def hostile(start: Callable[..., tracking.TrialWriter]) -> tracking.TrialWriter:
    """A run that is named after terminal escapes and markup wherever it has a name."""
    with start(name=HOSTILE, hparams={HOSTILE: HOSTILE}, entrypoint=HOSTILE, config=None) as recorder:
        recorder.write(
            [
                _report(1, HOSTILE, **{HOSTILE: 1.0, "text": HOSTILE}),
                _report(1, "training", **{HOSTILE: 1.0, "$a_{": 2.0}),
                tracking.StatusChanged(status=HOSTILE),
                tracking.CheckpointSaved(
                    uuid=f"abcd{HOSTILE}",
                    steps_completed=1,
                    path=HOSTILE,
                    metadata={HOSTILE: 1},
                    resources={HOSTILE: 1},
                    time=1.0,
                ),
            ]
        )
    return recorder


@pytest.fixture
def lab(tmp_path: pathlib.Path) -> Iterator[Lab]:
    """A home folder in which real experiments can run."""
    with opened_lab(tmp_path / "lab") as made:
        yield made


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searched]:
    """A real search over a trial class; it is for looking at only."""
    with opened_lab(tmp_path_factory.mktemp("searched") / "lab") as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_PROGRESS", "0")
        config = made.write(CLASS_CONFIG).rename(made.code / "config.yaml")  # where most people have it
        output = made.succeeds("experiment", "create", config, made.code, "--follow")
        yield Searched(made, output)
