"""What is no plain file where a checkpoint should have one is neither waited for nor read without end."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest

from determined import core, storage
from determined.errors import InvalidCheckpointException


def pipe(path: pathlib.Path) -> None:
    os.mkfifo(path)


def endless_device(path: pathlib.Path) -> None:
    path.symlink_to("/dev/zero")


def link_outside(path: pathlib.Path) -> None:
    path.symlink_to("/etc/hostname")


def folder(path: pathlib.Path) -> None:
    path.mkdir()


def terabyte(path: pathlib.Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse


PLANTS = [pipe, endless_device, link_outside, folder, terabyte]


@pytest.fixture
def checkpoints() -> core.CheckpointContext:
    with core.init() as context:
        yield context.checkpoint


def saved(checkpoints: core.CheckpointContext) -> pathlib.Path:
    with checkpoints.store_path({"steps_completed": 1}) as (path, storage_id):
        (path / "weights").write_text("12345")
    return checkpoints.store.path(storage_id)


@pytest.mark.parametrize("plant", PLANTS)
def test_metadata_that_are_no_plain_file_are_refused(
    plant: Callable[[pathlib.Path], None], checkpoints: core.CheckpointContext
) -> None:
    path = saved(checkpoints) / "metadata.json"
    path.unlink()
    plant(path)
    with pytest.raises(InvalidCheckpointException, match=r"metadata\.json cannot be read"):
        checkpoints.get_metadata(path.parent.name)


@pytest.mark.parametrize("plant", [*PLANTS[:3], folder])
def test_what_is_planted_beside_the_files_is_not_copied(
    plant: Callable[[pathlib.Path], None], checkpoints: core.CheckpointContext, tmp_path: pathlib.Path
) -> None:
    path = saved(checkpoints)
    plant(path / "planted")
    checkpoints.download(path.name, tmp_path / "copy")
    assert sorted(one.name for one in (tmp_path / "copy").iterdir()) == ["manifest.json", "metadata.json", "weights"]


def test_deleting_a_checkpoint_leaves_the_other_names_of_its_files(
    checkpoints: core.CheckpointContext, tmp_path: pathlib.Path
) -> None:
    path = saved(checkpoints)
    (tmp_path / "outside").write_text("mine")
    os.link(tmp_path / "outside", path / "planted")
    checkpoints.delete(path.name)
    assert (tmp_path / "outside").read_text() == "mine"


def test_pipe_in_a_leftover_is_cleared(tmp_path: pathlib.Path) -> None:
    store = storage.FolderStore(tmp_path)
    (tmp_path / "a.partial").mkdir()
    os.mkfifo(tmp_path / "a.partial" / "pipe")
    assert store.clear_leftovers() == ["a.partial"]
    assert list(tmp_path.iterdir()) == []


def test_pipe_in_what_becomes_a_checkpoint_is_left_out_of_its_manifest(tmp_path: pathlib.Path) -> None:
    store = storage.FolderStore(tmp_path)
    with store.create("a") as path:
        os.mkfifo(path / "pipe")
        (path / "file").touch()
    assert list(store.open("a").manifest.files) == ["file"]
