"""Making checkpoints of a run, and finding the one to go on from."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from determined import errors
from determined._home import home
from determined.core._context import Context
from determined.pytorch import _checkpoint, _code
from determined.pytorch._callback import Callbacks
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._progress import Progress


class Stateful(Protocol):
    """A part of the loop whose state a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Saved(NamedTuple):
    """A checkpoint that was read."""

    uuid: str
    path: pathlib.Path
    state: dict[str, Any]


def find(services: Context, checkpoint: str | os.PathLike[str]) -> Saved:
    """Return the checkpoint of an id, or at a path."""
    given = os.fspath(checkpoint)
    path = pathlib.Path(given)
    if os.sep not in given and not path.is_dir():
        with services.checkpoint.restore_path(given) as folder:
            return Saved(given, folder, _resumable(folder))
    if not path.is_dir():
        found = "a file, not a folder," if path.exists() else "nothing"
        raise errors.CheckpointNotFoundException(
            f"There is {found} at latest_checkpoint={given!r}; pass the folder of a checkpoint, or an id that "
            "`det checkpoint list` shows."
        )
    return Saved(path.resolve().name, path, _resumable(path))


def _resumable(folder: pathlib.Path) -> dict[str, Any]:
    state = _checkpoint.read(folder)
    if missing := [key for key in ("loop", "rng_state") if key not in state]:
        raise errors.InvalidCheckpointException(
            f"The checkpoint in {folder} lacks {' and '.join(missing)}, without which training cannot go on; its "
            "models can be used with pytorch.load_trial_from_checkpoint_path()."
        )
    return state


class Saver:
    """Saves the state of a run and puts it back: what is wrapped, callbacks, and the loop's own."""

    def __init__(
        self,
        trial_class: type,
        context: PyTorchTrialContext,
        callbacks: Callbacks,
        progress: Progress,
        loop_parts: Mapping[str, Stateful],
    ) -> None:
        self._trial_class = trial_class
        self._context = context
        self._callbacks = callbacks
        self._progress = progress
        self._loop_parts = loop_parts
        self.latest: str | None = None
        """The id of the checkpoint saved or loaded last."""

    def save(self) -> str:
        """Save the run as it is and return the checkpoint's id."""
        self._progress.last_ckpt = self._progress.batches_trained
        state = _checkpoint.snapshot(self._context)
        state["callbacks"] = self._callbacks.state_dict()
        state["loop"] = {name: part.state_dict() for name, part in self._loop_parts.items()}
        state["loop"] |= {"seed": self._context.trial_seed, "threads": torch.get_num_threads()}
        self._callbacks.run("on_checkpoint_save_start", state)
        metadata = _checkpoint.metadata(self._progress.batches_trained)
        with self._context.services.checkpoint.store_path(metadata) as (folder, uuid):
            self._write(folder, state)
        self.latest = uuid
        self._callbacks.run("on_checkpoint_upload_end", uuid)
        return uuid

    def restore(self, saved: Saved) -> None:
        """Put the run into a saved state, all but random numbers, which opening the data may still draw."""
        self._callbacks.run("on_checkpoint_load_start", saved.state)
        _checkpoint.restore(self._context, saved.state)
        self._callbacks.load_state_dict(saved.state.get("callbacks", {}))
        loop = saved.state["loop"]
        for name, part in self._loop_parts.items():
            if name in loop:
                part.load_state_dict(loop[name])
        self.latest = saved.uuid

    def _write(self, folder: pathlib.Path, state: dict[str, Any]) -> None:
        program, files = self._program
        _checkpoint.write(folder, state, _checkpoint.description(self._context, program, self._trial_class))
        if program.root is not None:
            _code.copy_program(program.root, files, folder / _checkpoint.CODE_FOLDER)
        if self._context.distributed.is_chief:
            self._callbacks.run("on_checkpoint_write_end", folder)
            self._callbacks.run("on_checkpoint_end", str(folder))

    @functools.cached_property
    def _program(self) -> tuple[_code.Program, list[pathlib.Path]]:
        program = _code.program_of(self._trial_class)
        if program.root is None:
            return program, []
        return program, _code.program_files(program.root, [home().path, self._context.services.checkpoint.store.root])
