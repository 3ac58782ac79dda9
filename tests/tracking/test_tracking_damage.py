"""A tracking database that was damaged on the disk, or that a killed process has left."""

from __future__ import annotations

import os
import pathlib
import shutil
import sqlite3
from contextlib import closing
from typing import Any

import pytest

from determined import tracking
from determined.errors import DatabaseException, TrackingException

pytestmark = pytest.mark.usefixtures("on_a_file")

PAGE = 4096
REPORTS = 60


def report(step: int) -> tracking.MetricReport:
    return tracking.MetricReport(group="training", steps_completed=step, metrics={"loss": 1 / (step + 1)}, time=5.0)


@pytest.fixture
def left(database: pathlib.Path, describe_run: Any) -> pathlib.Path:
    """A database whose last reports are still in its log, as a killed process leaves it."""
    whole = database.parent / "whole"
    with tracking.TrialWriter.start(whole / database.name, describe_run()) as writer:
        for step in range(REPORTS):
            writer.write([report(step)])
        for file in whole.iterdir():
            shutil.copy(file, database.parent)
    shutil.rmtree(whole)
    database.with_name(f"{database.name}-shm").unlink()
    return database


@pytest.fixture
def whole(left: pathlib.Path) -> pathlib.Path:
    """The same in one file."""
    with closing(sqlite3.connect(left)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return left


def steps(database: pathlib.Path) -> list[int]:
    return [one.steps_completed for one in tracking.TrackingReader(database).metrics(1)]


def test_what_is_in_the_log_of_a_killed_process_is_read(left: pathlib.Path) -> None:
    assert left.with_name(f"{left.name}-wal").stat().st_size > PAGE
    assert steps(left) == list(range(REPORTS))


def test_a_log_that_a_power_cut_has_torn_loses_only_its_end(left: pathlib.Path) -> None:
    log = left.with_name(f"{left.name}-wal")
    content = log.read_bytes()
    found = []
    for length in range(len(content), len(content) - 8 * PAGE, -PAGE):
        log.write_bytes(content[:length])
        found.append(len(steps(left)))
        log.with_name(f"{left.name}-shm").unlink(missing_ok=True)
        assert steps(left) == list(range(found[-1]))
    assert found[0] == REPORTS
    assert found == sorted(found, reverse=True)
    assert REPORTS - 8 <= found[-1] < REPORTS


@pytest.mark.parametrize("page", [1, 4])
def test_a_damaged_file_is_refused_with_its_name_and_what_to_do(page: int, whole: pathlib.Path) -> None:
    content = whole.read_bytes()
    damaged = b"".join(
        content[start : start + PAGE] if start // PAGE < page else os.urandom(PAGE)
        for start in range(0, len(content), PAGE)
    )
    whole.write_bytes(damaged)
    said = r"tracking\.db' .*`det doctor` checks it. Restore a backup.*move it away.*\.recover.*checkpoints are not"
    with pytest.raises(DatabaseException, match=said):
        steps(whole)


def test_a_file_without_its_end_is_refused(whole: pathlib.Path) -> None:
    os.truncate(whole, whole.stat().st_size // 2)
    with pytest.raises(DatabaseException, match=r"tracking\.db"):
        tracking.TrialWriter.attach(whole, 1, 1).write([report(100)])


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE metrics SET metrics = '{' WHERE id = 7", "'{' is not JSON"),
        ("UPDATE metrics SET metrics = '[1]' WHERE id = 7", r"'\[1\]' is not JSON of a dict"),
        ("UPDATE trials SET state = 'RUNNING'", "'RUNNING' is not a RunState"),
        ("UPDATE trials SET pid = 5, identity = '{}'", "{} is not the identity of a process"),
        ("UPDATE schema_version SET version = 0", "schema version is 0"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(statement: str, said: str, whole: pathlib.Path) -> None:
    with closing(sqlite3.connect(whole)) as connection, connection:
        connection.execute(statement)
    with pytest.raises(DatabaseException, match=rf"tracking\.db' is damaged: .*{said}.*`det doctor`"):
        tracking.TrackingReader(whole).trial(1)


def test_tables_that_are_gone_are_not_created_again(whole: pathlib.Path) -> None:
    with closing(sqlite3.connect(whole)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("DELETE FROM sqlite_master")
    with pytest.raises(TrackingException, match="its tables are gone"):
        tracking.TrialWriter.attach(whole, 1, 1)
