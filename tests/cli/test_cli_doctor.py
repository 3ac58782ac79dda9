"""`det doctor` and `det backup`."""

from __future__ import annotations

import json
import pathlib
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from determined import tracking

Det = Callable[..., Any]


def problems(det: Det) -> list[tuple[str, str]]:
    result = det("doctor", "--json")
    found = [(one["what"], one["remedy"]) for one in json.loads(result.stdout)]
    assert result.exit_code == bool(found)
    return found


def ended_process() -> tracking.RunProcess:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = tracking.RunProcess.of(process.pid)
        process.communicate(b"\n", timeout=60)
    return found


@pytest.fixture
def managed(home: pathlib.Path) -> int:
    """An experiment that no process runs, with its program."""
    description = tracking.ExperimentDescription(name="search", config={"searcher": {"metric": "loss"}})
    with tracking.ExperimentStore.create(home / "tracking.db", description) as store:
        (home / "experiments" / str(store.experiment_id) / "code").mkdir(parents=True)
        return store.experiment_id


def test_a_home_folder_without_a_database_has_no_problems(det: Det, home: pathlib.Path) -> None:
    result = det("doctor")
    assert (result.exit_code, result.stdout) == (0, f"No problems found in {home}.\n")
    assert not home.exists()


def test_whole_experiments_have_no_problems(det: Det, finished: Any, managed: int, home: pathlib.Path) -> None:
    (home / "tensorboard" / "experiment-1" / "trial-1").mkdir(parents=True)
    (home / "tensorboard" / "unattached").mkdir()
    assert problems(det) == []


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("experiments/7", "experiments/7 belongs to experiment 7, which is not on record"),
        ("experiments/1/trial-9", "trial-9 belongs to trial 9, which is not on record"),
        ("tensorboard/experiment-8", "experiment-8 belongs to experiment 8"),
        ("tensorboard/experiment-1/trial-5", "trial-5 belongs to trial 5"),
    ],
)
def test_a_folder_that_is_not_on_record_is_named(
    folder: str, said: str, det: Det, finished: Any, home: pathlib.Path
) -> None:
    (home / folder).mkdir(parents=True)
    ((what, remedy),) = problems(det)
    assert said in what
    assert "Delete the folder" in remedy


def test_checkpoints_without_a_record_or_files_are_named(det: Det, finished: Any, home: pathlib.Path) -> None:
    (home / "checkpoints" / "abcd-1").rename(home / "checkpoints" / "efgh-2")
    result = det("doctor")
    assert result.exit_code == 1
    assert "Checkpoint efgh-2 is in" in result.stdout
    assert "Checkpoint abcd-1 of trial 1 is on record, but its files" in result.stdout
    assert result.stdout.count("`det gc`") == 2


def test_an_experiment_without_its_program_is_named(det: Det, managed: int, home: pathlib.Path) -> None:
    shutil.rmtree(home / "experiments" / str(managed) / "code")
    ((what, remedy),) = problems(det)
    assert f"Experiment {managed} has not ended, but its program" in what
    assert f"det experiment kill {managed}" in remedy


def test_claims_and_slots_of_processes_that_are_gone_are_named(det: Det, managed: int, home: pathlib.Path) -> None:
    gone = ended_process()
    with (
        tracking.ExperimentStore.open(home / "tracking.db", managed) as store,
        tracking.Slots(home / "tracking.db") as slots,
    ):
        store.claim(gone)
        slots.take(managed, 5, 1, 2, gone)
    (claim, remedy), (lease, nothing) = problems(det)
    assert f"Experiment {managed} is ACTIVE, but its runner (process {gone.pid}" in claim
    assert f"det experiment activate {managed}" in remedy
    assert f"Slot 0 is held for trial 5 by process {gone.pid}, which is gone" in lease
    assert "frees it" in nothing


def test_rows_that_belong_to_nothing_are_named(det: Det, finished: Any, home: pathlib.Path) -> None:
    with closing(sqlite3.connect(home / "tracking.db")) as connection, connection:
        connection.execute("UPDATE metrics SET trial_id = 99 WHERE id = 2")
    ((what, remedy),) = problems(det)
    assert what == "Row 2 of table metrics belongs to a row of table trials that is not there."
    assert "Restore a backup" in remedy


def test_a_damaged_file_is_named(det: Det, finished: Any, home: pathlib.Path) -> None:
    with closing(sqlite3.connect(home / "tracking.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = (home / "tracking.db").read_bytes()
    half = len(content) // 2
    (home / "tracking.db").write_bytes(content[:half] + b"\xff" * (len(content) - half))
    result = det("doctor")
    assert result.exit_code == 1
    assert "tracking.db" in result.stdout or "The database is damaged" in result.stdout
    assert "Restore a backup" in result.stdout


def test_a_backup_is_a_whole_database_for_its_owner_alone(
    det: Det, finished: Any, start: Callable[..., tracking.TrialWriter], home: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with start(name="still writing") as recorder:
        recorder.write([tracking.StatusChanged(status="busy")])
        result = det("backup", tmp_path / "what?#.db")
    copy = tmp_path / "what?#.db"
    assert (result.exit_code, result.stdout) == (0, f"Wrote {copy}\n")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert tracking.TrackingReader(copy).experiments() == tracking.TrackingReader(home / "tracking.db").experiments()
    assert tracking.TrackingReader(copy).trial(2).status == "busy"
    assert not list(tmp_path.glob(".what*"))


def test_a_backup_replaces_nothing(det: Det, finished: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine").write_text("notes")
    result = det("backup", tmp_path / "mine")
    assert (result.exit_code, (tmp_path / "mine").read_text()) == (1, "notes")
    assert "exists already; name a new file" in result.stderr


@pytest.mark.parametrize("is_there", [True, False])
def test_a_backup_that_cannot_be_made_is_refused(
    is_there: bool, det: Det, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    if is_there:
        request.getfixturevalue("finished")
    result = det("backup", tmp_path / "missing" / "copy.db")
    assert result.exit_code == 1
    assert ("cannot be written" if is_there else "there is no tracking database") in result.stderr
    assert not (tmp_path / "missing").exists()
