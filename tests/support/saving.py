"""Make a checkpoint, read it, change it."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import torch

from determined import pytorch, storage, tracking
from determined.pytorch import Batch
from trials import LineTrial, trainer


def records() -> tracking.TrackingReader:
    return tracking.TrackingReader(pathlib.Path(os.environ["DET_HOME"]) / "tracking.db")


def train(trial_class: type[LineTrial] = LineTrial, init: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Train a batch and return the trial."""
    with trainer(trial_class, **(init or {})) as (its_trainer, trial):
        its_trainer.fit(**({"max_length": Batch(1), "checkpoint_policy": "none"} | arguments))
    return trial


def save(trial_class: type[LineTrial] = LineTrial, **init: Any) -> pathlib.Path:
    """Train a batch and return the folder of the checkpoint."""
    train(trial_class, init)
    return pathlib.Path(records().checkpoints()[-1].path)


def state_in(folder: pathlib.Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "state_dict.pth", weights_only=True)
    return state


def reseal(folder: pathlib.Path) -> None:
    """Make a changed checkpoint one whose files are as its manifest says."""
    storage.Manifest.of(folder, storage.Manifest.read(folder).origin).write(folder)


def change_state(folder: pathlib.Path, **changes: Any) -> None:
    """Change entries of a checkpoint; None removes one."""
    state = state_in(folder) | changes
    torch.save({key: value for key, value in state.items() if value is not None}, folder / "state_dict.pth")
    reseal(folder)


def change_file(path: pathlib.Path, contents: str | bytes) -> None:
    """Write a file of a checkpoint anew, and its manifest with it."""
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    reseal(next(folder for folder in path.parents if (folder / "manifest.json").exists()))


def program_in(folder: pathlib.Path) -> pathlib.Path:
    """Return where the modules of the tests are in a checkpoint: below `code/` as below their repository."""
    (file,) = (folder / "code").rglob("trials.py")
    return file.parent


def trial_with(callback: pytorch.PyTorchCallback, base: type[LineTrial] = LineTrial) -> type[LineTrial]:
    class Trial(base):
        __module__ = type(callback).__module__  # a class of the program that has the callback

        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"mine": callback}

    return Trial
