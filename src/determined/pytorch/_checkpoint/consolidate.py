"""Converts a checkpoint of sharded models into one of unsharded models."""

from __future__ import annotations

import os
import pathlib
import shutil

from determined import errors, storage
from determined.pytorch._backends.base import StateCodec
from determined.pytorch._backends.shards import SHARDS_FOLDER
from determined.pytorch._checkpoint import format as checkpoint_format
from determined.pytorch._checkpoint import objects


def consolidate_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a checkpoint that was saved with `use_fsdp` into a folder, with all tensors unsharded in `state_dict.pth`.

    Needs host memory for the whole state of the training, but neither a GPU nor other processes.
    """
    source, target = pathlib.Path(source), pathlib.Path(target)
    checkpoint_format.verify(source)
    if not (source / SHARDS_FOLDER).is_dir():
        raise errors.InvalidCheckpointException(
            f"{source} has no {SHARDS_FOLDER}/: its {checkpoint_format.STATE_FILE} holds whole tensors already; copy "
            "it with `det checkpoint download`."
        )
    state = StateCodec().attach(checkpoint_format.read(source))
    manifest = storage.Manifest.read(source)
    for name in manifest.files:
        if name != checkpoint_format.STATE_FILE and name.partition("/")[0] != SHARDS_FOLDER:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    checkpoint_format.write_state(target, objects.Encoder().encode(state))
    storage.Manifest.of(target, manifest.origin).write(target)
