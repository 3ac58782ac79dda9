"""What every store does, wherever it keeps the files; each on a real server, or its emulator."""

from __future__ import annotations

import os
import pathlib
import shutil
from typing import Any

import pytest

from determined import errors, storage
from determined._home import home


@pytest.fixture
def store(location: Any) -> storage.CheckpointStore:
    """A store that is empty and ready."""
    store = storage.store_for(location, home().checkpoints)
    store.begin()
    return store


def fill(store: storage.CheckpointStore, uuid: str, size: int = 10) -> None:
    with store.create(uuid, {"trial_id": 7}) as folder:
        (folder / "metadata.json").write_text('{"steps_completed": 3}')
        (folder / "sub").mkdir()
        (folder / "sub" / "weights 1%?").write_bytes(os.urandom(size))
        (folder / "empty").touch()
    store.wait()


def forget_copies() -> None:
    """Remove what this machine has of checkpoints that are elsewhere."""
    shutil.rmtree(home().stores, ignore_errors=True)


def test_checkpoint_comes_back_as_it_was(store: storage.CheckpointStore) -> None:
    with store.create("one", {"trial_id": 7}) as folder:
        written = {"a": b"", "b/c": os.urandom(100_000), "metadata.json": b'{"steps_completed": 3}'}
        (folder / "b").mkdir()
        for name, data in written.items():
            (folder / name).write_bytes(data)
    store.wait()
    forget_copies()
    with store.open("one") as saved:
        assert saved.metadata == {"steps_completed": 3}
        assert saved.manifest.origin == {"trial_id": 7}
        assert saved.created > 1_700_000_000
        saved.verify()
        assert {name: (saved.folder / name).read_bytes() for name in written} == written


def test_checkpoint_can_be_read_at_once(store: storage.CheckpointStore) -> None:
    with store.create("one") as folder:
        (folder / "file").write_text("text")
    with store.open("one") as saved:
        saved.verify()
        assert saved.file("file").read_text() == (saved.folder / "file").read_text() == "text"
    store.wait()


def test_stored_checkpoint_is_found_by_its_location(store: storage.CheckpointStore) -> None:
    fill(store, "one")
    forget_copies()
    at = storage.location_in(store, "one")
    with storage.open_at(at) as saved:
        assert saved.location == at
        assert saved.file("empty").read_bytes() == b""
        assert not saved.file("no such file").exists()


def test_store_lists_what_is_complete(store: storage.CheckpointStore) -> None:
    fill(store, "b")
    fill(store, "a")
    with store.create("c"):
        assert store.list() == ["a", "b"]
    store.wait()
    assert store.list() == ["a", "b", "c"]


def test_action_is_called_when_the_checkpoint_is_stored(store: storage.CheckpointStore) -> None:
    with store.create("one"):
        pass
    found: list[object] = []
    store.when_stored("one", lambda: found.append(store.list()))
    store.wait("one")
    assert found == [["one"]]


def test_failed_checkpoint_leaves_nothing(store: storage.CheckpointStore) -> None:
    def fail() -> None:
        with store.create("one") as folder:
            (folder / "file").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    store.wait()
    assert store.list() == []
    with pytest.raises(errors.CheckpointNotFoundException, match="'one'"):
        store.open("one")


def test_existing_checkpoint_is_not_written_over(store: storage.CheckpointStore) -> None:
    fill(store, "one")
    forget_copies()
    with store.open("one") as saved:
        before = saved.manifest

    def fill_again() -> None:
        fill(store, "one", size=20)

    with pytest.raises(errors.StorageException, match="'one' exists already"):
        fill_again()
    forget_copies()
    with store.open("one") as saved:
        assert saved.manifest == before


def test_deleted_checkpoint_is_gone(store: storage.CheckpointStore) -> None:
    fill(store, "one")
    fill(store, "two")
    store.delete("one")
    assert store.list() == ["two"]
    for call in (store.open, store.delete):
        with pytest.raises(errors.CheckpointNotFoundException, match="'one'"):
            call("one")
    assert store.clear_leftovers() == []


@pytest.mark.parametrize("uuid", ["../x", "", "a/b", "tensorboard/x"])
def test_what_is_no_id_is_refused(tmp_path: pathlib.Path, uuid: str) -> None:
    store = storage.store_for("memory://ids", tmp_path)
    for call in (store.open, store.delete):
        with pytest.raises(errors.InvalidCheckpointException, match="is not a checkpoint id"):
            call(uuid)


def test_damage_in_the_store_is_noticed(store: storage.CheckpointStore) -> None:
    if not isinstance(store, storage.FsspecStore):
        pytest.skip("the damage of folders has tests of its own")
    fill(store, "one", size=1000)
    forget_copies()
    store.objects.write("one/sub/weights 1%?", b"x" * 1000)
    with (
        store.open("one") as saved,
        pytest.raises(errors.InvalidCheckpointException, match=r"/one.* is damaged.*weights 1%\?.*checksum"),
    ):
        _ = saved.folder
    store.objects.write("one/sub/weights 1%?", b"x")
    with (
        store.open("one") as saved,
        pytest.raises(errors.InvalidCheckpointException, match="has 1 bytes, and had 1000"),
    ):
        saved.verify()
    store.objects.remove(["one/empty"])
    with store.open("one") as saved, pytest.raises(errors.InvalidCheckpointException, match="and had 0 when"):
        saved.verify()


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of aiohttp, about its caller
def test_large_file_goes_and_comes_in_parts(store: storage.CheckpointStore) -> None:
    data = os.urandom(1 << 20) * 40 + b"end"
    with store.create("one") as folder:
        (folder / "large").write_bytes(data)
    store.wait()
    forget_copies()
    with store.open("one") as saved:
        assert (saved.folder / "large").read_bytes() == data


def test_files_of_a_folder_are_mirrored(store: storage.CheckpointStore, tmp_path: pathlib.Path) -> None:
    if not isinstance(store, storage.FsspecStore):
        pytest.skip("a folder needs no mirror")
    source, known = tmp_path / "source", dict[str, tuple[int, int]]()
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "events").write_bytes(b"one")
    store.put_tree(source, "curves/1", known)
    (source / "sub" / "events").write_bytes(b"one two")
    (source / "new").touch()
    store.put_tree(source, "curves/1", known)
    for _ in range(2):
        assert store.get_tree("curves", tmp_path / "target") == 2
    assert (tmp_path / "target" / "1" / "sub" / "events").read_bytes() == b"one two"
    assert store.list() == store.clear_leftovers() == []
