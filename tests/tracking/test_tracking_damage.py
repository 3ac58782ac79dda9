"""A tracking database that was damaged on the disk: reading it gives what was recorded, or is refused."""

from __future__ import annotations

import itertools
import pathlib
import random
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import damaging
import pytest
from damaging import PAGE, into_one_file, read_all, wrong

from determined import tracking
from determined.errors import TrackingException

FLIPS = 18
LOG_FLIPS = 50
QUARTERS = pytest.mark.parametrize(
    "quarter", [0, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, 2, 3))]
)
"""Each has damage of its own; any would show a kind that is not noticed."""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder that a killed process has left, with its last transactions in the log of the database."""
    folder = tmp_path_factory.mktemp("left")
    damaging.write_runs(folder / "tracking.db")
    return folder


@pytest.fixture(scope="module")
def truth(left: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    copy = tmp_path_factory.mktemp("truth") / "left"
    shutil.copytree(left, copy)
    return read_all(copy / "tracking.db")


@pytest.fixture
def database(left: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    shutil.copytree(left, tmp_path / "left")
    return tmp_path / "left" / "tracking.db"


@pytest.fixture
def whole(database: pathlib.Path) -> bytes:
    """What is in the database's only file."""
    return into_one_file(database)


def put(database: pathlib.Path, content: bytes, log: bytes | None = None) -> pathlib.Path:
    """Replace the files of the database, as if they had been found so."""
    for suffix in ("-wal", "-shm"):
        pathlib.Path(f"{database}{suffix}").unlink(missing_ok=True)
    database.write_bytes(content)
    if log is not None:
        pathlib.Path(f"{database}-wal").write_bytes(log)
    return database


def flipped(content: bytes, flips: int, seed: int) -> Iterator[bytes]:
    """Yield the content with one bit changed, at random places."""
    places = random.Random(seed)
    for _ in range(flips):
        changed = bytearray(content)
        changed[places.randrange(len(content))] ^= 1 << places.randrange(8)
        yield bytes(changed)


def pages_of(content: bytes) -> list[bytes]:
    return [content[start : start + PAGE] for start in range(0, len(content), PAGE)]


def test_what_is_in_the_log_of_a_killed_process_is_read(truth: dict[str, Any]) -> None:
    assert None not in truth.values()
    assert [len(truth[f"metrics {run}"]) for run in (1, 2, 3)] == [66, 66, 66]
    assert len(truth["history 3"]) > len(truth["metrics 3"])
    assert [one.trial_count for one in truth["experiments"]] == [1, 1, 1]
    assert [one.checkpoint_count for one in truth["experiments"]] == [1, 1, 1]


# The file


@QUARTERS
def test_no_flipped_bit_of_the_file_changes_what_is_read(
    quarter: int, database: pathlib.Path, whole: bytes, truth: dict[str, Any]
) -> None:
    refusals = 0
    for content in flipped(whole, FLIPS, seed=quarter):
        put(database, content)
        found = read_all(database)
        assert wrong(found, truth) == []
        refusals += None in found.values()
    assert refusals > FLIPS / 10, "most bits are in the empty parts of pages, but not that many"


@QUARTERS
def test_no_cut_of_the_file_changes_what_is_read(
    quarter: int, database: pathlib.Path, whole: bytes, truth: dict[str, Any]
) -> None:
    # An empty file is one that is just being created.
    for length in range((quarter + 1) * PAGE, len(whole), 4 * PAGE):
        for cut in (length, length - PAGE // 3):
            put(database, whole[:cut])
            found = read_all(database)
            assert wrong(found, truth) == []
            assert None in found.values()


@QUARTERS
def test_no_emptied_page_changes_what_is_read(
    quarter: int, database: pathlib.Path, whole: bytes, truth: dict[str, Any]
) -> None:
    for number in range(quarter, len(whole) // PAGE, 4):
        pages = pages_of(whole)
        pages[number] = bytes(PAGE)
        put(database, b"".join(pages))
        found = read_all(database)
        assert wrong(found, truth) == []


@QUARTERS
def test_no_exchanged_pages_change_what_is_read(
    quarter: int, database: pathlib.Path, whole: bytes, truth: dict[str, Any]
) -> None:
    pairs = list(itertools.combinations(range(1, len(whole) // PAGE), 2))
    for one, other in random.Random(quarter).sample(pairs, 10):
        pages = pages_of(whole)
        pages[one], pages[other] = pages[other], pages[one]
        put(database, b"".join(pages))
        assert wrong(read_all(database), truth) == []


@QUARTERS
def test_writing_to_a_damaged_file_hides_no_damage(
    quarter: int, database: pathlib.Path, whole: bytes, truth: dict[str, Any]
) -> None:
    added = tracking.MetricReport(group="training", steps_completed=900, metrics={"loss": 0.0}, time=1.0)
    for content in flipped(whole, FLIPS // 2, seed=4 + quarter):
        put(database, content)
        try:
            with tracking.TrialWriter.attach(database, 1, 1) as recorder:
                recorder.write([added, tracking.StatusChanged(status="added")])
            expected = [*truth["metrics 1"], added]
        except TrackingException:
            expected = truth["metrics 1"]
        found = read_all(database)
        assert found["metrics 1"] in (None, expected)
        assert [name for name in wrong(found, truth) if name.split()[0] in ("checkpoints", "by name", "sources")] == []
        assert found["trial 2"] in (None, truth["trial 2"])


# The log


@pytest.fixture
def log(database: pathlib.Path) -> bytes:
    """A log of a few transactions, the last of which is a report; the file holds what came before."""
    base = into_one_file(database)
    recorder = tracking.TrialWriter.attach(database, 1, 1)
    for step in range(100, 106):
        metrics = {"loss": float(step)}
        recorder.write([tracking.MetricReport(group="training", steps_completed=step, metrics=metrics, time=1.0)])
    log = pathlib.Path(f"{database}-wal").read_bytes()
    recorder.close()
    put(database, base)
    return log


def steps(database: pathlib.Path) -> list[int] | None:
    try:
        return [one.steps_completed for one in tracking.TrackingReader(database).metrics(1, "training")]
    except TrackingException:
        return None


def test_no_flipped_bit_of_the_log_loses_more_than_its_last_transaction(database: pathlib.Path, log: bytes) -> None:
    base = database.read_bytes()
    put(database, base, log)
    every = steps(database)
    assert every is not None
    assert every[-1] == 105
    refusals = 0
    for number, content in enumerate(flipped(log, LOG_FLIPS, seed=4)):
        found = steps(put(database.with_name(f"{number}.db"), base, content))
        # A last one that is broken is what a power cut leaves of a transaction that nobody was told is stored.
        assert found in (None, every, every[:-1])
        refusals += found is None
    assert refusals > LOG_FLIPS / 2


def test_no_cut_of_the_log_makes_a_wrong_number(database: pathlib.Path, log: bytes) -> None:
    base = database.read_bytes()
    put(database, base, log)
    every = steps(database) or []
    for length in range(0, len(log), PAGE):
        found = steps(put(database.with_name(f"{length}.db"), base, log[:length]))
        assert found is not None
        assert found == every[: len(found)]
        assert len(found) >= len(every) - 6


def test_broken_log_is_said_with_the_way_on(database: pathlib.Path, log: bytes) -> None:
    broken = bytearray(log)
    broken[100] ^= 1
    put(database, database.read_bytes(), bytes(broken))
    said = r"tracking\.db-wal'.*6 transactions.*sqlite3.*wal_checkpoint"
    with pytest.raises(TrackingException, match=said) as caught:
        tracking.TrialWriter.attach(database, 1, 1)
    (statement,) = re.findall(r"'(PRAGMA [^']+)'", str(caught.value))
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(statement)
    assert (steps(database) or [])[-1] == 59


def test_what_an_older_use_of_the_log_left_is_no_damage(database: pathlib.Path, log: bytes) -> None:
    with tracking.TrialWriter.attach(database, 1, 1) as recorder:
        for step in range(100, 106):
            recorder.write([tracking.ProgressChanged(progress=step / 1000)])
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA wal_checkpoint(RESTART)")
        recorder.write([tracking.ProgressChanged(progress=0.5)])  # over the first frames of six transactions
        assert tracking.TrackingReader(database).trial(1).progress == 0.5


# What is said


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE metrics SET metrics = '{\"loss\": 0.0}' WHERE id = 7", "row 7 of table 'metrics'.*checksum"),
        ("UPDATE metrics SET checksum = NULL WHERE id = 7", "row 7 of table 'metrics' has None as 'checksum'"),
        ("UPDATE trials SET seed = 5 WHERE id = 1", "row 1 of table 'trials'.*checksum"),
        ("DELETE FROM metrics WHERE id = 66", "65 metrics of 1, group 'training', where 66|59 metrics of 1"),
        ("DELETE FROM tallies WHERE kind = 'metrics'", "tally"),
        ("UPDATE tallies SET count = 3 WHERE kind = 'metrics'", "tally of the metrics of 1.*checksum"),
    ],
)
def test_damage_is_named_with_what_to_do(database: pathlib.Path, statement: str, finding: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(statement)
    said = rf"tracking\.db' is damaged: .*({finding}).*restore a copy.*move it away.*\.recover.*checkpoints are not"
    with pytest.raises(TrackingException, match=said):
        tracking.TrackingReader(database).trial(1)


def test_a_lost_trial_is_missed_by_those_that_continue_it(database: pathlib.Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE trials SET id = 0 WHERE id = 1")
    with pytest.raises(TrackingException, match="the trial of row 1 of table 'checkpoints' is gone"):
        tracking.TrackingReader(database).history(2)


def test_damage_to_one_trial_leaves_the_others_readable(database: pathlib.Path, truth: dict[str, Any]) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE metrics SET time = 1.0 WHERE trial_id = 1")
    found = read_all(database)
    assert found["metrics 1"] is None
    assert found["trial 2"] == truth["trial 2"]


def test_damaged_database_can_be_accepted_as_it_is(database: pathlib.Path, truth: dict[str, Any]) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("DELETE FROM metrics WHERE id = 7")
        connection.execute("UPDATE schema_version SET version = 1")
    assert len(tracking.TrackingReader(database).metrics(1)) == len(truth["metrics 1"]) - 1
    with tracking.TrialWriter.attach(database, 1, 1) as recorder:
        recorder.write([tracking.ProgressChanged(progress=1.0)])
    assert tracking.TrackingReader(database).trial(1).progress == 1.0
