"""Locks of what is being written: they end with the process that writes, and others may come between."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
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
    assert store.list() == ["a", "b"]


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


HOLDER = {"kernel": "the kernel of another machine", "host": "node-2", "pid": os.getpid()}


@pytest.fixture(params=[json.dumps(HOLDER), "", "{", "[]"], ids=["complete", "empty", "cut off", "of another form"])
def foreign(store: storage.FolderStore, request: pytest.FixtureRequest) -> pathlib.Path:
    """What a process of another machine, which shares the file system, stages; its lock may not be written yet."""
    folder = store.root / "a.partial"
    (folder / "rank_0").mkdir(parents=True)
    (folder / "rank_0" / "weights").touch()
    (store.root / "a.partial.lock").write_text(request.param)
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


def test_what_another_machine_holds_is_not_cleared_however_old_its_files_are(
    store: storage.FolderStore, foreign: pathlib.Path
) -> None:
    age(store.root, 7 * 24 * 3600)
    os.utime(foreign.with_name("a.partial.lock"))
    assert store.clear_leftovers() == []


def test_lock_names_its_holder_and_is_touched_while_it_is_held(
    store: storage.FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("determined.storage._locks.HEARTBEAT_S", 0.01)
    with store.create("a"):
        lock = store.root / "a.partial.lock"
        holder = json.loads(lock.read_text())
        assert (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid())
        os.utime(lock, (0, 0))
        while lock.stat().st_mtime == 0:
            time.sleep(0.01)


def test_lock_of_this_machine_outlives_no_process_however_young_it_is(
    store: storage.FolderStore, writer: subprocess.Popen[str]
) -> None:
    writer.kill()
    writer.wait()
    shutil.rmtree(store.root / "a.partial")
    assert store.clear_leftovers() == []
    assert list(store.root.iterdir()) == []


def test_what_an_earlier_version_stages_is_cleared_after_a_day(store: storage.FolderStore) -> None:
    (store.root / "a.partial").mkdir(parents=True)
    (store.root / "a.partial.owner").write_text("the kernel of this machine")
    assert store.clear_leftovers() == []
    age(store.root, 25 * 3600)
    assert store.clear_leftovers() == ["a.partial"]
    assert list(store.root.iterdir()) == []


def test_locks_exclude_each_other_though_their_files_come_and_go(tmp_path: pathlib.Path) -> None:
    holding, most = 0, 0

    def hold() -> None:
        nonlocal holding, most
        for _ in range(50):
            with storage.locked(tmp_path / "a"):
                holding += 1
                most = max(most, holding)
                time.sleep(0)
                holding -= 1

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_beside_a_checkpoint(store: storage.FolderStore) -> None:
    with store.create("a"):
        assert {path.name for path in store.root.iterdir()} == {"a.partial", "a.partial.lock"}
    with pytest.raises(ZeroDivisionError), store.create("b"):
        raise ZeroDivisionError
    assert [path.name for path in store.root.iterdir()] == ["a"]
