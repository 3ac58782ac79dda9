"""Locks of what is being written: they end with the process that writes, and others may come between."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from determined import errors, storage

WRITER = """
import os, pathlib, sys
from determined import storage
store = storage.FolderStore(pathlib.Path(sys.argv[1]))
with store.create("a") as folder:
    (folder / "file").touch()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
"""


@pytest.fixture
def store(tmp_path: pathlib.Path) -> storage.FolderStore:
    return storage.FolderStore(tmp_path / "store")


@pytest.fixture
def writer(store: storage.FolderStore) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of writing, with a forked child that lives until the test ends."""
    command = [sys.executable, "-c", WRITER, str(store.root)]
    source = str(pathlib.Path(storage.__file__).parents[2])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source}
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def test_leftover_of_a_dead_process_is_cleared_also_while_its_children_live(
    store: storage.FolderStore, writer: subprocess.Popen[str]
) -> None:
    assert store.clear_leftovers() == []
    writer.kill()
    writer.wait()
    assert store.clear_leftovers() == ["a.partial"]


def test_forked_process_that_writes_on_does_not_take_the_lock_from_its_parent(store: storage.FolderStore) -> None:
    with store.create("a") as folder:
        (folder / "file").touch()
        child = os.fork()
        if child == 0:
            with store.create("b") as other:
                (other / "file").touch()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.clear_leftovers() == []
    assert store.ids() == ["a", "b"]


def fill(store: storage.FolderStore, names: list[str]) -> None:
    for name in names:
        with store.create(name) as folder:
            for number in range(5):
                (folder / str(number)).mkdir()
                (folder / str(number) / "file").touch()


def test_clearing_in_the_middle_of_a_deletion_disturbs_neither(store: storage.FolderStore) -> None:
    names = [f"id-{number}" for number in range(15)]
    fill(store, names)
    done = threading.Event()

    def clear() -> None:
        while not done.is_set():
            store.clear_leftovers()

    clearing = threading.Thread(target=clear)
    clearing.start()
    try:
        for name in names:
            store.delete(name)
    finally:
        done.set()
        clearing.join()
    assert list(store.root.iterdir()) == []


def test_checkpoint_deleted_by_several_at_once_is_deleted_by_one_and_not_found_by_the_others(
    store: storage.FolderStore,
) -> None:
    names = [f"id-{number}" for number in range(10)]
    fill(store, names)
    together, outcomes = threading.Barrier(3, timeout=20), []

    def delete() -> None:
        for name in names:
            together.wait()
            try:
                store.delete(name)
                outcomes.append("deleted")
            except errors.CheckpointNotFoundException:
                outcomes.append("not found")

    threads = [threading.Thread(target=delete) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that they come between each other
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(outcomes) == ["deleted"] * 10 + ["not found"] * 20
    assert list(store.root.iterdir()) == []


def test_checkpoint_that_vanishes_while_it_is_deleted_is_gone(store: storage.FolderStore) -> None:
    fill(store, ["a"])
    shutil.rmtree(store.root / "a")
    with pytest.raises(errors.CheckpointNotFoundException, match="no checkpoint 'a'"):
        store.delete("a")


@pytest.fixture
def foreign(store: storage.FolderStore) -> pathlib.Path:
    """What a process of another machine, which shares the file system, stages."""
    folder = store.root / "a.partial"
    (folder / "rank_0").mkdir(parents=True)
    (folder / "rank_0" / "weights").touch()
    (store.root / "a.partial.owner").write_text("the kernel of another machine")
    return folder


def age(folder: pathlib.Path, seconds: float) -> None:
    """Make everything in a folder older."""
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))


def test_what_another_machine_writes_is_not_cleared(store: storage.FolderStore, foreign: pathlib.Path) -> None:
    age(store.root, 7 * 24 * 3600)
    os.utime(foreign / "rank_0" / "weights")
    assert store.clear_leftovers() == []
    assert (foreign / "rank_0" / "weights").exists()


def test_what_another_machine_left_days_ago_is_cleared(store: storage.FolderStore, foreign: pathlib.Path) -> None:
    age(store.root, 25 * 3600)
    assert store.clear_leftovers() == ["a.partial"]
    assert list(store.root.iterdir()) == []


def test_nothing_is_left_beside_a_checkpoint(store: storage.FolderStore) -> None:
    with store.create("a"):
        assert {path.name for path in store.root.iterdir()} == {"a.partial", "a.partial.owner"}
    with pytest.raises(ZeroDivisionError), store.create("b"):
        raise ZeroDivisionError
    assert [path.name for path in store.root.iterdir()] == ["a"]
