"""Make a checkpoint of spread models one of whole models."""

from __future__ import annotations

import pathlib
import shutil

from determined import errors, storage
from determined.pytorch import _checkpoint, _objects
from determined.pytorch._keeping import SHARDS_FOLDER, WholeState


def consolidate(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a checkpoint into a folder, with all tensors of its shards whole in `state_dict.pth`.

    Needs memory for the whole state of the training, and neither a GPU nor other processes.
    """
    _checkpoint.verify(source)
    if not (source / SHARDS_FOLDER).is_dir():
        raise errors.InvalidCheckpointException(
            f"{source} has no {SHARDS_FOLDER}/: its {_checkpoint.STATE_FILE} holds whole tensors already; copy it with "
            "`det checkpoint download`."
        )
    state = WholeState().attach(_checkpoint.read(source))
    manifest = storage.Manifest.read(source)
    for name in manifest.files:
        if name != _checkpoint.STATE_FILE and name.partition("/")[0] != SHARDS_FOLDER:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    _checkpoint.write_state(target, _objects.Encoder().encode(state))
    storage.Manifest.of(target, manifest.origin).write(target)
