"""Checkpoints as folders: whole or not at all."""

from __future__ import annotations

import os
import pathlib
import random
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined import errors, storage


@pytest.fixture
def store(tmp_path: pathlib.Path) -> storage.FolderStore:
    return storage.FolderStore(tmp_path / "store")


def fill(store: storage.FolderStore, checkpoint_id: str) -> pathlib.Path:
    with store.create(checkpoint_id) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text(checkpoint_id)
    return store.path(checkpoint_id)


def test_created_checkpoint_has_its_files(store: storage.FolderStore) -> None:
    assert (fill(store, "a") / "sub" / "file").read_text() == "a"


def test_store_lists_its_checkpoints(store: storage.FolderStore) -> None:
    for name in ("b", "a"):
        fill(store, name)
    assert store.list() == ["a", "b"]


def test_none_of_a_thousand_flipped_bits_is_overlooked(store: storage.FolderStore) -> None:
    rng = random.Random(19)
    with store.create("a") as folder:
        (folder / "code").mkdir()
        for name, size in {"state_dict.pth": 30_000, "load_data.json": 400, "code/model.py": 2_000}.items():
            (folder / name).write_bytes(rng.randbytes(size))
    paths = [path for path in store.path("a").rglob("*") if path.is_file()]
    for number in range(1000):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(errors.InvalidCheckpointException, match=path.name):
            store.open("a").verify()
        path.write_bytes(whole)
    store.open("a").verify()


def test_store_that_does_not_exist_yet_is_empty(store: storage.FolderStore) -> None:
    assert store.list() == []


def test_reading_creates_nothing(store: storage.FolderStore) -> None:
    with pytest.raises(errors.CheckpointNotFoundException):
        store.path("a")
    assert not store.root.exists()


def test_unfinished_checkpoint_is_not_listed_nor_found(store: storage.FolderStore) -> None:
    with store.create("a"):
        assert store.list() == []
        with pytest.raises(errors.CheckpointNotFoundException):
            store.path("a")


def test_failed_checkpoint_leaves_nothing(store: storage.FolderStore) -> None:
    def fail() -> None:
        with store.create("a") as folder:
            (folder / "file").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(store.root.iterdir()) == []


def test_existing_checkpoint_is_not_written_over(store: storage.FolderStore) -> None:
    fill(store, "a")
    with pytest.raises(errors.StorageException, match="exists already"), store.create("a"):
        pytest.fail("the block began")
    assert (store.path("a") / "sub" / "file").read_text() == "a"


def test_deleted_checkpoint_is_gone(store: storage.FolderStore) -> None:
    fill(store, "a")
    fill(store, "b")
    store.delete("a")
    assert [path.name for path in store.root.iterdir()] == ["b"]


def test_folders_are_for_their_owner_alone(store: storage.FolderStore) -> None:
    before = os.umask(0)
    try:
        folder = fill(store, "a")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (store.root, folder)] == [0o700, 0o700]


def test_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    store = storage.FolderStore(tmp_path / "file" / "store")
    with pytest.raises(errors.StorageException, match="DET_HOME or checkpoint_storage") as caught, store.create("a"):
        pytest.fail("the block began")
    assert str(store.root) in str(caught.value)


@given(st.text(max_size=12))
def test_no_id_leads_out_of_the_store(name: str) -> None:
    store = storage.FolderStore(pathlib.Path("/nowhere/store"))
    with pytest.raises(errors.InvalidCheckpointException) as caught:
        store.path(name)
    if isinstance(caught.value, errors.CheckpointNotFoundException):  # an id that could be
        assert (store.root / name).parent == store.root
        assert name not in (".", "..")
