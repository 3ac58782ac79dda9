"""Reading what Determined 0.38 wrote, admitting just the types that its files hold."""

from __future__ import annotations

import io
import pathlib
import pickle
from typing import Any, NoReturn

import numpy as np
import torch

from determined import errors, storage

PROGRESS_FILE = "trial_state.pkl"

# What unpickling raises for bytes that are no pickle, or not one of these.
_UNREADABLE = (
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    MemoryError,
)


def is_legacy(folder: pathlib.Path) -> bool:
    """Say whether a checkpoint was written by Determined."""
    return (folder / PROGRESS_FILE).is_file()


def numpy_types() -> list[Any]:
    """Return what `torch.load` must admit for a pickled NumPy generator state: arrays, and nothing else."""
    # The same function under the name that NumPy 1 gave it and the one that NumPy 2 gives it.
    reconstruct: Any = np.ndarray(0).__reduce__()[0]
    return [
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        type(np.dtype(np.uint32)),
    ]


def load_state(path: pathlib.Path, **options: Any) -> dict[str, Any]:
    """Return the contents of `state_dict.pth`, read by `torch.load` with these options."""
    with torch.serialization.safe_globals(numpy_types()):
        state: dict[str, Any] = torch.load(path, **options)
    return state


def load_progress(folder: pathlib.Path) -> dict[str, Any]:
    """Return the progress in our form from a pickled dict of ints."""
    path = folder / PROGRESS_FILE
    try:
        saved = _IntsOnly(io.BytesIO(storage.read_plain(path.resolve()))).load()
        names = ("batches_trained", "epochs_trained", "last_val", "last_ckpt")
        return {name: _count(saved[name]) for name in names}
    except _UNREADABLE as error:
        raise errors.InvalidCheckpointException(
            f"{path} is not the progress of a Determined trial: {type(error).__name__}: {error}"
        ) from error


def _count(value: Any) -> int:
    count = int(value)
    if not 0 <= count < 2**63:
        raise ValueError("it holds a number of batches that cannot be")
    return count


class _IntsOnly(pickle.Unpickler):
    """Unpickles plain values and refuses every class and function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which has no place there")
