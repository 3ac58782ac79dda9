"""A store that has no folders: everything goes by the protocol, and a storage is one module to add."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from det_command import run_det
from determined import core, errors, storage
from determined._home import home
from determined.core import checkpoint_gc
from determined.pytorch import Batch
from determined.storage import _base
from trials import assert_same, fit, records

CONFIG = {"checkpoint_storage": {"type": "memory"}, "reproducibility": {"experiment_seed": 3}}


class _Copy(storage.SavedCheckpoint):
    """A checkpoint whose files are fetched when they are asked for."""

    is_copy = True

    def __init__(self, checkpoint_id: str, location: str, objects: Mapping[str, bytes]) -> None:
        super().__init__(checkpoint_id, location, pathlib.Path(tempfile.mkdtemp(prefix="copy-")))
        self._objects = objects

    @property
    def folder(self) -> pathlib.Path:
        for name in self._objects:
            self.file(name)
        return self._folder

    def file(self, name: str) -> pathlib.Path:
        path = self._folder / name
        if name in self._objects and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._objects[name])
        return path

    def close(self) -> None:
        shutil.rmtree(self._folder)


class MemoryStore:
    """Keeps the files of checkpoints under names, as object stores do: without folders and renames."""

    def __init__(self, url: str = "memory://bucket") -> None:
        self.location = url
        self.objects: dict[str, dict[str, bytes]] = {}

    def check(self) -> None:
        pass

    def begin(self) -> None:
        pass

    def when_stored(self, checkpoint_id: str, action: Callable[[], None]) -> None:
        action()

    def wait(self, checkpoint_id: str | None = None) -> None:
        pass

    @contextlib.contextmanager
    def create(self, checkpoint_id: str, origin: Mapping[str, Any] | None = None) -> Iterator[pathlib.Path]:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            yield folder
            storage.Manifest.of(folder, origin or {}).write(folder)
            files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
            # The manifest last: a checkpoint without one is not there.
            for name in sorted(files, key=lambda one: one == storage.MANIFEST_FILE):
                self.objects.setdefault(checkpoint_id, {})[name] = files[name].read_bytes()

    def open(self, checkpoint_id: str) -> storage.SavedCheckpoint:
        if checkpoint_id not in self.list():
            raise errors.CheckpointNotFoundException(f"There is no checkpoint {checkpoint_id!r} in {self.location}.")
        return _Copy(checkpoint_id, f"{self.location}/{checkpoint_id}", self.objects[checkpoint_id])

    def delete(self, checkpoint_id: str) -> None:
        self.open(checkpoint_id).close()
        del self.objects[checkpoint_id]

    def list(self) -> Sequence[str]:
        return sorted(one for one, files in self.objects.items() if storage.MANIFEST_FILE in files)

    def clear_leftovers(self) -> Sequence[str]:
        return []


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """A store in memory, at memory://bucket."""
    made = MemoryStore()
    monkeypatch.setitem(_base.url_schemes, "memory", lambda _: made)
    monkeypatch.setitem(_base.section_types, "memory", lambda _: made)
    return made


@pytest.fixture(autouse=True)
def temporary(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a copy of a checkpoint behind."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.glob("copy-*")) == []


TAPE = """
import pathlib
from determined.storage import FolderStore
from determined.storage._base import section_types, url_schemes
section_types["tape"] = lambda section: FolderStore(pathlib.Path("/tapes", section["name"]))
url_schemes["tape"] = lambda url: FolderStore(pathlib.Path("/tapes", url.removeprefix("tape://")))
"""


def test_storage_is_one_module_to_add(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_tape.py").write_text(TAPE)
    monkeypatch.setattr(storage, "__path__", [*storage.__path__, str(tmp_path)])
    for registry in (_base.section_types, _base.url_schemes):
        monkeypatch.setitem(registry, "tape", None)  # removed after the test
    monkeypatch.setitem(sys.modules, "determined.storage._tape", None)
    del sys.modules["determined.storage._tape"]
    assert storage.store_for("tape://blue", home().checkpoints).location == "/tapes/blue"
    assert storage.store_for({"type": "tape", "name": "red"}, home().checkpoints).location == "/tapes/red"


@pytest.mark.parametrize("location", ["memory://bucket", {"type": "memory", "save_trial_best": 1}])
def test_store_is_chosen_by_type_or_scheme(store: MemoryStore, location: Any) -> None:
    assert storage.store_for(location, home().checkpoints) is store


def test_core_saves_and_reads_through_the_protocol(store: MemoryStore, tmp_path: pathlib.Path) -> None:
    with core.init(checkpoint_storage="memory://bucket") as context:
        checkpoints = context.checkpoint
        with checkpoints.store_path({"steps_completed": 3}) as (folder, uuid):
            (folder / "sub").mkdir()
            (folder / "sub" / "weights").write_text("12345")
        assert checkpoints.get_metadata(uuid) == {"steps_completed": 3}
        with checkpoints.restore_path(uuid) as folder:
            assert (folder / "sub" / "weights").read_text() == "12345"
        with checkpoints.restore_path(uuid, selector=lambda name: name.startswith("sub")) as folder:
            assert [path.name for path in folder.iterdir()] == ["sub"]
        checkpoints.download(uuid, tmp_path / "copy")
        storage.open_at(str(tmp_path / "copy")).verify()
        (record,) = records().checkpoints()
        assert (record.path, record.resources["sub/weights"]) == (f"memory://bucket/{uuid}", 5)
        checkpoints.delete(uuid)
        assert store.list() == []
        with pytest.raises(errors.CheckpointNotFoundException), checkpoints.restore_path(uuid):
            pass


def test_training_continues_from_a_checkpoint_that_is_not_a_folder(store: MemoryStore) -> None:
    init = {"exp_conf": CONFIG}
    fit(init=init, max_length=Batch(2))
    resumed = fit(init=init, max_length=Batch(4), latest_checkpoint="latest")
    assert resumed.seen == [(0, 2), (0, 3)]
    assert_same(resumed.model.state_dict(), fit(init=init, max_length=Batch(4)).model.state_dict())


def test_commands_read_and_delete_by_the_location_on_record(store: MemoryStore, tmp_path: pathlib.Path) -> None:
    fit(init={"exp_conf": CONFIG}, max_length=Batch(2))
    (uuid,) = store.list()
    assert run_det("checkpoint", "download", uuid, "-o", tmp_path / "copy").exit_code == 0
    storage.open_at(str(tmp_path / "copy")).verify()
    assert run_det("checkpoint", "delete", uuid, "--yes").exit_code == 0
    assert store.list() == []


def test_store_and_record_are_brought_together_again(store: MemoryStore) -> None:
    with core.init(checkpoint_storage="memory://bucket") as context:
        with context.checkpoint.store_path() as (_, lost):
            pass
        with context.checkpoint.store_path() as (_, kept):
            pass
        origin = context.recorder.origin
    with store.create("found", origin) as folder:
        (folder / "metadata.json").write_text("{}")
    del store.objects[lost]
    assert checkpoint_gc.record_unrecorded(store, home().database) == ["found"]
    assert checkpoint_gc.mark_missing(store, home().database) == [lost]
    assert store.list() == sorted([kept, "found"])
