"""`det gc`: what it clears, records, removes and closes, and what it must not touch."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

import forking
from determined import core, storage, tracking

Det = Callable[..., Any]

HOLDING = """
import pathlib, sys
from determined.storage import FolderStore
with FolderStore(pathlib.Path(sys.argv[1])).create("living") as folder:
    (folder / "weights").write_text("half")
    print("staged", flush=True)
    sys.stdin.readline()
"""


def save() -> str:
    with core.init() as context, context.checkpoint.store_path() as (folder, uuid):
        (folder / "weights").write_text("12345")
    return uuid


@pytest.fixture
def store(home: pathlib.Path) -> storage.FolderStore:
    return storage.FolderStore(home / "checkpoints")


@pytest.fixture
def records(home: pathlib.Path) -> tracking.TrackingReader:
    return tracking.TrackingReader(home / "tracking.db")


def state_of(records: tracking.TrackingReader, uuid: str) -> tracking.CheckpointState:
    return records.checkpoint(uuid).state


def test_nothing_to_do_is_said(det: Det, home: pathlib.Path) -> None:
    result = det("gc")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["0"] * 7
    assert not home.exists()


def test_what_is_in_order_stays(det: Det, store: storage.FolderStore, records: tracking.TrackingReader) -> None:
    uuid = save()
    assert det("gc").exit_code == 0
    assert store.list() == [uuid]
    assert state_of(records, uuid) is tracking.CheckpointState.COMPLETED
    store.open(uuid).verify()


def holding(store: storage.FolderStore) -> forking.Process:
    return forking.start(["-c", HOLDING, str(store.root)], stdin=forking.PIPE, stdout=forking.PIPE)


def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(det: Det, store: storage.FolderStore) -> None:
    store.root.mkdir(parents=True)
    (store.root / "dead.partial").mkdir()
    (store.root / "dead.partial" / "weights").write_text("half")
    with holding(store) as living:
        assert living.stdout is not None
        assert living.stdout.readline() == "staged\n"
        assert "1 incomplete checkpoints removed\n  dead.partial\n" in det("gc").stdout
        living.communicate("\n", timeout=60)
    assert living.returncode == 0
    store.open("living").verify()


def test_an_experiment_goes_whose_creation_was_killed_and_one_that_is_being_created_stays(
    det: Det, home: pathlib.Path
) -> None:
    killed, living = (home / "experiments" / f"new-{name}" for name in ("killed", "living"))
    for folder in (killed, living):
        (folder / "code").mkdir(parents=True)
    with storage.locked(living):
        assert "1 incompletely created experiments removed\n  new-killed\n" in det("gc").stdout
    assert (killed.exists(), living.exists()) == (False, True)


def test_leftover_of_a_process_that_was_killed_goes(det: Det, store: storage.FolderStore) -> None:
    with holding(store) as killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        killed.kill()
    assert "living.partial" in det("gc").stdout
    assert list(store.root.iterdir()) == []


def test_complete_checkpoint_that_is_not_on_record_is_recorded(
    det: Det, store: storage.FolderStore, records: tracking.TrackingReader, home: pathlib.Path
) -> None:
    save()
    with store.create("found", {"database": str(home / "tracking.db"), "experiment_id": 1, "trial_id": 1}) as folder:
        (folder / "metadata.json").write_text('{"steps_completed": 7}')
    assert "1 checkpoints added to the database\n  found\n" in det("gc").stdout
    assert records.checkpoint("found").steps_completed == 7


def test_bytes_of_a_deleted_checkpoint_are_removed(det: Det, store: storage.FolderStore, home: pathlib.Path) -> None:
    kept, doomed = save(), save()
    with tracking.TrialWriter.attach(home / "tracking.db", 2, 2) as recorder:
        recorder.write([tracking.CheckpointDeleted(uuid=doomed)])
    assert f"1 folders of deleted checkpoints removed\n  {doomed}\n" in det("gc").stdout
    assert store.list() == [kept]


def test_record_of_a_vanished_checkpoint_is_closed(
    det: Det, store: storage.FolderStore, records: tracking.TrackingReader
) -> None:
    kept, lost = save(), save()
    shutil.rmtree(store.path(lost))
    assert f"1 missing checkpoints marked as deleted\n  {lost}\n" in det("gc").stdout
    assert state_of(records, lost) is tracking.CheckpointState.DELETED
    assert state_of(records, kept) is tracking.CheckpointState.COMPLETED


def test_another_store_can_be_named(det: Det, tmp_path: pathlib.Path, store: storage.FolderStore) -> None:
    for root in (tmp_path / "other", store.root):
        (root / "dead.partial").mkdir(parents=True)
    assert det("gc", tmp_path / "other").exit_code == 0
    assert list((tmp_path / "other").iterdir()) == []
    assert (store.root / "dead.partial").exists()


def test_folders_of_other_people_stay(det: Det, store: storage.FolderStore) -> None:
    save()
    (store.root / "notes").mkdir()
    (store.root / "notes" / "read.me").write_text("mine")
    (store.root / "file.txt").write_text("mine")
    assert det("gc").exit_code == 0
    assert (store.root / "notes" / "read.me").read_text() == "mine"
    assert (store.root / "file.txt").exists()


def test_hostile_names_are_printed_as_text(det: Det, store: storage.FolderStore) -> None:
    (store.root / "a\a\x1b[31m.partial").mkdir(parents=True)
    result = det("gc")
    assert result.exit_code == 0
    assert not {"\a", "\x1b"} & set(result.stdout)
    assert list(store.root.iterdir()) == []


def test_logs_that_were_kept_long_enough_are_removed(det: Det, home: pathlib.Path) -> None:
    config = {"retention_policy": {"log_retention_days": 0}}
    description = tracking.ExperimentDescription(name="old", config=config)
    with tracking.ExperimentStore.create(home / "tracking.db", description) as store:
        store.claim()
        ended = tracking.ExperimentChange(state=tracking.RunState.COMPLETED)
        store.commit(tracking.Changeset(experiment_change=ended))
        store.release()
    log = home / "experiments" / "1" / "runner.log"
    log.parent.mkdir(parents=True)
    log.write_text("words\n")
    assert f"1 expired logs removed\n  {log}\n" in det("gc").stdout
    assert not log.exists()
