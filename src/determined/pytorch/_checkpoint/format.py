"""The files of a checkpoint: writing, verifying and reading them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pathlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import torch

from determined import errors, storage
from determined._secrets import mask
from determined._version import VERSION
from determined.pytorch._backends.shards import SHARDS_FOLDER, check_unpacked_size, with_references
from determined.pytorch._checkpoint import code, identity, legacy, objects
from determined.pytorch._context import PyTorchTrialContext

STATE_FILE = "state_dict.pth"
LOAD_FILE = legacy.LOAD_FILE
CODE_FOLDER = "code"
FORMAT = "resolute-1"


class Saved(NamedTuple):
    """A checkpoint that was read."""

    source: storage.SavedCheckpoint
    state: dict[str, Any]

    @property
    def uuid(self) -> str:
        """Its id."""
        return self.source.id

    @property
    def path(self) -> pathlib.Path:
        """The folder with its files, on this machine."""
        return self.source.folder

    @property
    def batches_trained(self) -> int:
        """Batches trained when it was saved."""
        count: int = self.state["loop"]["progress"]["batches_trained"]
        return count


def existing_folder(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return the path of a folder; raise `CheckpointNotFoundException` for anything else."""
    folder = pathlib.Path(path)
    if not folder.is_dir():
        found = "a file, not a folder," if folder.exists() else "nothing"
        raise errors.CheckpointNotFoundException(
            f"There is {found} at {folder}; pass the folder of a checkpoint. `det checkpoint list` shows ids, and "
            "`det checkpoint describe ID` the folder."
        )
    return folder


def rules_of(trial_class: type, initial: Mapping[str, Any]) -> objects.Rules:
    """Return which classes a checkpoint may hold for a trial whose state holds `initial` before it loads anything.

    Raises `InvalidExperimentException` if they hold what cannot be saved.
    """
    return objects.Rules(initial, functools.cache(functools.partial(code.program_modules, trial_class)))


def write(folder: pathlib.Path, state: dict[str, Any], description: dict[str, Any]) -> None:
    """Write the state, in plain data, and the description of its program into a folder."""
    write_state(folder, state)
    (folder / LOAD_FILE).write_text(json.dumps(description, default=str))


def write_state(folder: pathlib.Path, state: dict[str, Any]) -> None:
    """Write the state, in plain data, into a folder."""
    with (folder / STATE_FILE).open("w+b") as file:
        _save(state, file)


def check(state: dict[str, Any]) -> None:
    """Raise for a state, in plain data, that could not be loaded safely."""
    _save(state, io.BytesIO())


def _save(state: dict[str, Any], file: IO[bytes]) -> None:
    if (fault := _fault(state, file)) is not None:
        places = ", ".join(sorted(_unsafe_places(state, "")))
        raise errors.InvalidExperimentException(
            f"The checkpoint would hold, under {places}, what cannot be loaded safely: {fault}. Convert it in "
            "state_dict() or on_checkpoint_save_start()."
        )


def read(folder: pathlib.Path, **options: Any) -> dict[str, Any]:
    """Return the state in a checkpoint's folder, also of one that Determined wrote.

    Objects are still plain data; `objects.decode` makes them objects again.
    `options` are passed to `torch.load`. By default, only data is loaded, with tensors on the CPU.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise errors.InvalidCheckpointException(
            f"{folder} is not a complete checkpoint of a PyTorchTrial: it has no {STATE_FILE}. "
            "Use another one; `det checkpoint list` shows what there is."
        )
    is_legacy = legacy.is_legacy(folder)
    load = legacy.load_state if is_legacy else torch.load
    # Memory-mapped: a file that was just verified need not be read and copied again.
    loading: dict[str, Any] = {"map_location": "cpu", "weights_only": True, "mmap": not is_legacy} | options
    try:
        with path.open("rb") as file:
            check_unpacked_size(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about what a forged file names
            state = objects.with_arrays(load(path, **loading))
    except Exception as error:  # torch raises anything for files that are damaged, or that hold more than data
        raise errors.InvalidCheckpointException(f"{path} cannot be read: {error}") from error
    if not isinstance(state, dict) or "models_state_dict" not in state:
        raise errors.InvalidCheckpointException(
            f"{path} holds a {type(state).__name__}, not the state of a PyTorchTrial, which is a dict with "
            "models_state_dict; pass a checkpoint that fit() saved."
        )
    if (folder / SHARDS_FOLDER).is_dir():
        state = dict(with_references(state, folder / SHARDS_FOLDER))
    return state | {"loop": {"progress": legacy.load_progress(folder)}} if is_legacy else state


def verify(folder: pathlib.Path, *, with_code: bool = True) -> None:
    """Raise `InvalidCheckpointException` unless a checkpoint is as it was saved; those of Determined have no checksums.

    Without `with_code`, the program's files are not checked.
    """
    if (folder / storage.MANIFEST_FILE).exists() or not legacy.is_legacy(folder):
        storage.Manifest.read(folder).verify(folder, except_below=None if with_code else CODE_FOLDER)


@contextlib.contextmanager
def reading(folder: pathlib.Path) -> Iterator[None]:
    """Raise `InvalidCheckpointException` inside the block for a state that does not have the right form."""
    try:
        yield
    except errors.InvalidCheckpointException:  # it has the better message
        raise
    except (TypeError, AttributeError, ValueError, LookupError, OverflowError, RuntimeError) as error:
        raise errors.InvalidCheckpointException(
            f"The checkpoint in {folder} holds a state that fit() did not save ({type(error).__name__}: {error}); "
            "use another one."
        ) from error


def metadata(steps_completed: int) -> dict[str, Any]:
    """Return the metadata that goes with a checkpoint."""
    return {
        "steps_completed": steps_completed,
        "framework": f"torch-{torch.__version__}",
        "format": FORMAT,
        "resolute_version": VERSION,
    }


def run_description(context: PyTorchTrialContext, trial_class: type) -> dict[str, Any]:
    """Return what distinguishes a run from others: its program, hyperparameters and config, without secrets."""
    return {
        "program": identity.program_path(),
        "trial_cls_spec": f"{code.import_name(trial_class.__module__)}:{trial_class.__qualname__}",
        "experiment_config": mask(context.config_if_any or {}),
        "hparams": context.hparams_if_any or {},
    }


def description(context: PyTorchTrialContext, program: code.Program, trial_class: type) -> dict[str, Any]:
    """Return what `load_trial_from_checkpoint_path` needs to build the trial again, and what the run was."""
    return {
        "trial_type": "PyTorchTrial",
        **run_description(context, trial_class),
        "import_paths": list(program.import_paths),
        "is_trainer": True,
    }


def _fault(value: Any, file: IO[bytes]) -> str | None:
    """Save a value to a file and return why it cannot be loaded safely; None if it can."""
    try:
        torch.save(value, file)  # a Python file raises the error of the disk, which torch's own file does not name
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        return str(error)
    except RuntimeError as error:
        # After an error of the disk, torch still tries to finish its archive and reports only that failure.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    file.seek(0)
    return ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(file)) or None


def _unsafe_places(value: Any, place: str) -> Iterator[str]:
    """Name the innermost entries of a state that cannot be loaded safely."""
    if _fault(value, io.BytesIO()) is None:
        return
    entries = value.items() if isinstance(value, dict) else ()
    inner = [found for key, one in entries for found in _unsafe_places(one, f"{place}.{key}" if place else str(key))]
    yield from inner or [place]
