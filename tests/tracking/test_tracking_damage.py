"""A tracking database that was damaged on the disk: what cannot be read is refused."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import sqlite3
from typing import Any

import pytest

from determined import tracking
from determined.errors import TrackingException

PAGE = 4096
FLIPS = 100
REPORTS = 60


@pytest.fixture
def database(tmp_path: pathlib.Path) -> pathlib.Path:
    """A database whose last reports are still in its write-ahead log, as a killed process leaves it."""
    description = tracking.RunDescription(
        name="lines", config={}, hparams={"lr": 0.1}, seed=1, entrypoint="train.py", torch_version=None,
        resolute_version="0", git_commit=None, pid=os.getpid(), process_started=0.0, host="here",
    )  # fmt: skip
    with tracking.Recorder.start(tmp_path / "whole" / "tracking.db", description) as recorder:
        for step in range(REPORTS):
            metrics = {"loss": 1 / (step + 1), "accuracy": step / 1000}
            recorder.write([tracking.MetricReport(group="training", steps_completed=step, metrics=metrics, time=0.0)])
        shutil.copytree(tmp_path / "whole", tmp_path / "left")
    (tmp_path / "left" / "tracking.db-shm").unlink()
    return tmp_path / "left" / "tracking.db"


TRUE_REPORTS = [(step, {"loss": 1 / (step + 1), "accuracy": step / 1000}) for step in range(REPORTS)]


def reports_in(database: pathlib.Path) -> list[tuple[int, dict[str, Any]]] | None:
    """Return what is on record; None if that is refused."""
    (database.parent / "tracking.db-shm").unlink(missing_ok=True)
    try:
        return [(one.steps_completed, one.metrics) for one in tracking.Records(database).metrics(1)]
    except TrackingException:
        return None


def test_reports_in_the_log_of_a_killed_process_are_read(database: pathlib.Path) -> None:
    assert (database.parent / "tracking.db-wal").stat().st_size > 10 * PAGE
    assert reports_in(database) == TRUE_REPORTS


def test_no_flipped_bit_of_the_log_makes_a_wrong_number(database: pathlib.Path) -> None:
    log = database.parent / "tracking.db-wal"
    whole, places = log.read_bytes(), random.Random(3)
    for _ in range(FLIPS):
        changed = bytearray(whole)
        changed[places.randrange(len(whole))] ^= 1 << places.randrange(8)
        log.write_bytes(changed)
        found = reports_in(database)
        assert found is None or found == TRUE_REPORTS[: len(found)]


def test_no_cut_of_the_log_makes_a_wrong_number(database: pathlib.Path) -> None:
    log = database.parent / "tracking.db-wal"
    whole = log.read_bytes()
    for length in range(0, len(whole), 3 * PAGE):
        log.write_bytes(whole[:length])
        found = reports_in(database)
        assert found is None or found == TRUE_REPORTS[: len(found)]


def into_one_file(database: pathlib.Path) -> bytes:
    """Move what is in the log into the database, and return that."""
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return database.read_bytes()


def test_no_cut_of_the_database_makes_a_wrong_number(database: pathlib.Path) -> None:
    whole = into_one_file(database)
    for length in range(0, len(whole), PAGE // 2):
        database.write_bytes(whole[:length])
        assert reports_in(database) in (None, TRUE_REPORTS)


def test_damaged_database_raises_nothing_but_its_own_exception(database: pathlib.Path) -> None:
    whole, places = into_one_file(database), random.Random(4)
    for _ in range(FLIPS):
        changed = bytearray(whole)
        changed[places.randrange(len(whole))] ^= 1 << places.randrange(8)
        database.write_bytes(changed)
        reports_in(database)
