"""A driven experiment and models whose database was damaged: reading gives what was recorded, or is refused."""

from __future__ import annotations

import contextlib
import pathlib
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import driving
import pytest
from damaging import PAGE, into_one_file, wrong
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from determined import tracking
from determined.errors import TrackingException

TRIALS = 3
FLIPS = 15
TABLES = ("experiments", "trials", "metrics", "tallies", "events", "snapshots", "runs", "runners", "models", "versions")


def write(database: pathlib.Path) -> None:
    """Make an experiment with trials that had several runs, and models with checkpoints of them."""
    details = {"labels": ["a", "b"], "description": "why", "priority": 3}
    with driving.claimed(database, **details) as ledger:
        ids = driving.add_trials(ledger, TRIALS)
        for run_id, start in ((1, 0), (2, 4)):
            if run_id > 1:
                driving.begin_runs(ledger, ids, run_id, step=start)
            for id in ids:
                with tracking.TrialWriter.attach(database, 1, id, run_id) as recorder:
                    recorder.write([driving.report(start + step, loss=step / id) for step in range(1, 8)])
                    recorder.write([driving.saved(f"{id}-{run_id}", step=start + 7)])
        for number in range(1, 41, 4):
            events = [driving.event(one, f"request {one}", value=one / 7) for one in range(number, number + 4)]
            state = {"number": number, "rungs": list(range(number))}
            ledger.commit(tracking.Changeset(events=events, snapshot=tracking.Snapshot(number=number + 3, state=state)))
    registry = tracking.Registry(database)
    for name in ("digits", "letters"):
        registry.create_model(name, labels=["x"], metadata={"of": name})
        for id in ids:
            registry.register_version(name, f"{id}-2", comment=f"trial {id}")
    into_one_file(database)


RECORDS: dict[str, Callable[[tracking.TrackingReader], Any]] = {
    "experiments": lambda records: records.experiments(),
    "trials": lambda records: records.trials(1),
    "runs": lambda records: [records.runs(id) for id in range(1, TRIALS + 1)],
    "registered": lambda records: records.registered_checkpoints(),
}
LEDGER: dict[str, Callable[[tracking.ExperimentStore], Any]] = {
    "events": lambda ledger: ledger.events(),
    "last events": lambda ledger: ledger.events(after=35),
    "snapshot": lambda ledger: ledger.snapshot(),
    "entries": lambda ledger: ledger.trials(),
    "validations": lambda ledger: ledger.validations(),
    "last validations": lambda ledger: ledger.validations(after_id=30),
    "control": lambda ledger: ledger.control(),
    "runner": lambda ledger: ledger.runner(),
}
REGISTRY: dict[str, Callable[[tracking.Registry], Any]] = {
    "models": lambda registry: registry.models(),
    "versions": lambda registry: [registry.versions(name) for name in ("digits", "letters")],
}


def read_all(database: pathlib.Path) -> dict[str, Any]:
    """Return what each way of reading gives; None if it is refused."""
    found = of_reads(RECORDS, tracking.TrackingReader(database)) | of_reads(REGISTRY, tracking.Registry(database))
    with contextlib.suppress(TrackingException), tracking.ExperimentStore.open(database, 1) as ledger:
        found |= of_reads(LEDGER, ledger)
    return found


def of_reads(reads: dict[str, Callable[[Any], Any]], source: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(reads)
    for name, read in reads.items():
        with contextlib.suppress(TrackingException):
            found[name] = read(source)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    database = tmp_path_factory.mktemp("whole") / "tracking.db"
    write(database)
    return database


@pytest.fixture(scope="module")
def truth(whole: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    copy = tmp_path_factory.mktemp("truth") / "tracking.db"
    shutil.copy(whole, copy)
    found = read_all(copy)
    assert None not in found.values()
    assert len(found) == len(RECORDS) + len(LEDGER) + len(REGISTRY)
    assert (len(found["events"]), len(found["validations"]), len(found["last validations"])) == (40, 42, 12)
    return found


def flipped(content: bytes, seed: int) -> Iterator[bytes]:
    used = [place for place, byte in enumerate(content) if byte]  # the rest is mostly room between rows
    places = random.Random(seed)
    for _ in range(FLIPS):
        changed = bytearray(content)
        changed[places.choice(used)] ^= 1 << places.randrange(8)
        yield bytes(changed)


def emptied(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), PAGE):
        yield content[:start] + bytes(PAGE) + content[start + PAGE :]


def exchanged(content: bytes, seed: int) -> Iterator[bytes]:
    pages = [content[start : start + PAGE] for start in range(0, len(content), PAGE)]
    numbers = random.Random(seed)
    for _ in range(FLIPS // 2):
        one, other = numbers.sample(range(1, len(pages)), 2)
        changed = list(pages)
        changed[one], changed[other] = changed[other], changed[one]
        yield b"".join(changed)


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(lambda content: flipped(content, 1), id="bits"),
        pytest.param(lambda content: flipped(content, 2), id="other bits", marks=pytest.mark.thorough),
        pytest.param(lambda content: flipped(content, 3), id="more bits", marks=pytest.mark.thorough),
        pytest.param(emptied, id="pages", marks=pytest.mark.thorough),
        pytest.param(lambda content: exchanged(content, 2), id="order"),
        pytest.param(lambda content: exchanged(content, 3), id="another order", marks=pytest.mark.thorough),
    ],
)
def test_no_damage_of_the_file_changes_what_is_read(
    damaged: Callable[[bytes], Iterator[bytes]], whole: pathlib.Path, truth: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    refusals = 0
    for number, content in enumerate(damaged(whole.read_bytes())):
        database = tmp_path / f"{number}.db"
        database.write_bytes(content)
        found = read_all(database)
        assert wrong(found, truth) == []
        refusals += None in found.values()
    assert refusals > 1


@pytest.fixture(scope="module")
def columns(whole: pathlib.Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(whole)) as connection:
        return [(table, row[1]) for table in TABLES for row in connection.execute(f"PRAGMA table_info({table})")]


values = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.integers(-3, 9)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.sampled_from(["ACTIVE", "KILLED", "{}", "[]", '["a"]', '{"a": 1}', "STOP", "[" * 100_000, b"\xff"])
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=values)
def test_a_changed_value_is_never_taken_for_what_was_recorded(
    data: st.DataObject,
    value: Any,
    whole: pathlib.Path,
    truth: dict[str, Any],
    columns: list[tuple[str, str]],
    tmp_path: pathlib.Path,
) -> None:
    database = tmp_path / "tracking.db"
    shutil.copy(whole, database)
    table, column = data.draw(st.sampled_from(columns))
    with closing(sqlite3.connect(database)) as connection, connection, contextlib.suppress(sqlite3.Error):
        row = f"rowid = (SELECT max(rowid) FROM {table})"
        connection.execute(f'UPDATE {table} SET "{column}" = ? WHERE {row}', (value,))
    assert wrong(read_all(database), truth) == []


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM events WHERE number = 40", "39 events of experiment 1 from number 1 on where 40 were stored"),
        ("DELETE FROM events WHERE number = 3", "39 events of experiment 1"),
        ("UPDATE events SET payload = '{}' WHERE number = 3", "row 3 of table 'events'.*checksum"),
        ("UPDATE events SET checksum = NULL WHERE number = 3", "row 3 of table 'events' has None as 'checksum'"),
        ("DELETE FROM tallies WHERE kind = 'events'", "tally of the events of 1 is gone"),
    ],
)
def test_a_damaged_search_is_named_with_what_to_do(
    statement: str, said: str, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    database = tmp_path / "tracking.db"
    shutil.copy(whole, database)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(statement)
    said = rf"tracking\.db' is damaged: .*({said}).*restore a copy.*move it away.*\.recover"
    with tracking.ExperimentStore.open(database, 1) as ledger, pytest.raises(TrackingException, match=said):
        ledger.events()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE runners SET pid = 5", "row 1 of table 'runners' does not match its checksum"),
        ("UPDATE runners SET checksum = NULL", "row 1 of table 'runners' has None as 'checksum'"),
        ("DELETE FROM runners", "0 runners of 1 where 1 were stored"),
    ],
)
def test_a_damaged_claim_can_be_replaced_by_force(
    statement: str, said: str, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    database = tmp_path / "tracking.db"
    shutil.copy(whole, database)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(statement)
    with tracking.ExperimentStore.open(database, 1) as ledger:
        with pytest.raises(TrackingException, match=said):
            ledger.claim()
        ledger.claim(force=True)
        assert ledger.commit(tracking.Changeset(new_trials=[driving.new_trial("another")])) == [TRIALS + 1]


def test_a_damaged_database_can_be_accepted_as_it_is(
    whole: pathlib.Path, truth: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    database = tmp_path / "tracking.db"
    shutil.copy(whole, database)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE versions SET comment = 'other' WHERE id = 1")
        connection.execute("UPDATE events SET kind = 'other' WHERE number = 40")
        connection.execute("UPDATE schema_version SET version = 1")
    found = read_all(database)
    assert None not in found.values()
    assert wrong(found, truth) == ["versions", "events", "last events"]
    with tracking.ExperimentStore.open(database, 1) as ledger:
        ledger.claim()
        ledger.commit(tracking.Changeset(events=[driving.event(41)]))
        driving.begin_runs(ledger, [1], run_id=3, step=9)
        assert len(ledger.events()) == 41
        assert len(ledger.runs(1)) == 3
