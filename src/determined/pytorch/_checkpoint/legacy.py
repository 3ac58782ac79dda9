"""Reads checkpoints that Determined 0.13 to 0.38 wrote, allowing only the types that their files hold.

What changed over the versions, oldest first: the state of one model, optimizer and scheduler; lists of them;
`workload_sequencer.pkl` with the batches trained; `load_data.json`, which describes the trial as `metadata.json` did;
`trial_state.pkl` in place of the sequencer.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from determined import errors, storage

LOAD_FILE = "load_data.json"
METADATA_FILE = "metadata.json"
_PROGRESS_FILES = ("trial_state.pkl", "workload_sequencer.pkl")
_BATCHES = ("batches_trained", "steps_completed", "latest_batch")
"""The number of batches trained, under its names in the order from new to old."""
_SINGULAR_KEYS = {
    "model_state_dict": "models_state_dict",
    "optimizer_state_dict": "optimizers_state_dict",
    "lr_scheduler": "lr_schedulers_state_dict",
}


def is_legacy(folder: pathlib.Path) -> bool:
    """Return whether a checkpoint was written by Determined."""
    return _progress_file(folder) is not None or (
        not (folder / LOAD_FILE).exists() and "experiment_config" in _metadata(folder)
    )


def description(folder: pathlib.Path) -> dict[str, Any]:
    """Return the description of a trial from a checkpoint that is too old to have a `load_data.json`."""
    metadata = _metadata(folder)
    config = metadata.get("experiment_config")
    is_torch = "torch_version" in metadata or str(metadata.get("framework")).startswith("torch")
    return {
        "trial_type": "PyTorchTrial" if is_torch else metadata.get("framework"),
        "experiment_config": config,
        "hparams": metadata.get("hparams"),
        "trial_cls_spec": config.get("entrypoint") if isinstance(config, dict) else None,
    }


def _progress_file(folder: pathlib.Path) -> pathlib.Path | None:
    return next((folder / name for name in _PROGRESS_FILES if (folder / name).is_file()), None)


def _metadata(folder: pathlib.Path) -> dict[str, Any]:
    try:
        return storage.read_json((folder / METADATA_FILE).resolve())
    except (OSError, ValueError):
        return {}


def load_state(path: pathlib.Path, **options: Any) -> Any:
    """Return the contents of `state_dict.pth` in the current form, read by `torch.load` with these options."""
    # Of a pickled NumPy generator state: arrays, made by the same function under its names in NumPy 1 and 2.
    reconstruct: Any = np.ndarray(0).__reduce__()[0]
    names = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
    admitted: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), *((reconstruct, name) for name in names)]
    with torch.serialization.safe_globals(admitted):
        state = torch.load(path, **options)
    return _with_lists(state) if isinstance(state, dict) else state


def _with_lists(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with lists of models, optimizers and schedulers, also if it was saved for one of each."""
    if twice := [f"{one} and {many}" for one, many in _SINGULAR_KEYS.items() if one in state and many in state]:
        raise ValueError(f"it holds both {', '.join(twice)}; only one of the two forms can be meant")
    lists = {many: [] if state[one] is None else [state[one]] for one, many in _SINGULAR_KEYS.items() if one in state}
    return {"lr_schedulers_state_dict": [], "rng_state": [], **state, **lists}


def load_progress(folder: pathlib.Path) -> dict[str, Any]:
    """Return the progress in our form from a pickled dict of ints; the oldest checkpoints start at batch 0.

    Versions that counted only batches have no `epochs_trained`.
    """
    path = _progress_file(folder)
    if path is None:
        return {"batches_trained": 0, "last_val": None, "last_ckpt": None}
    try:
        saved = _IntsOnly(io.BytesIO(storage.read_plain(path.resolve()))).load()
        counts = {"batches_trained": saved[next(filter(saved.__contains__, _BATCHES), _BATCHES[0])]}
        if path.name == _PROGRESS_FILES[0]:
            counts["epochs_trained"] = saved["epochs_trained"]
        marks = {name: saved[name] for name in ("last_val", "last_ckpt") if saved[name] is not None}
        unknown = {"last_val": None, "last_ckpt": None}
        return unknown | {name: _count(value) for name, value in (counts | marks).items()}
    except Exception as error:  # pickle raises anything for bytes that are not a pickle
        raise errors.InvalidCheckpointException(
            f"{path} is not the progress of a Determined trial: {type(error).__name__}: {error}"
        ) from error


def _count(value: Any) -> int:
    count = int(value)
    if not 0 <= count < 2**63:
        raise ValueError(f"{count} is not a number of batches")
    return count


class _IntsOnly(pickle.Unpickler):
    """Unpickles plain values and refuses every class and function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, but only integers are allowed")
