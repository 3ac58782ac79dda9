"""Rows that hold anything at all: read as recorded, or refused by the package's own exception."""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil
import sqlite3
from contextlib import closing
from typing import Any

import damaging
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from determined import tracking
from determined.errors import TrackingException

TABLES = ("experiments", "trials", "metrics", "checkpoints", "tallies", "schema_version")


def without_rules(database: pathlib.Path) -> None:
    """Make the tables take NULL everywhere."""
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET sql = replace(replace(sql, ' NOT NULL', ''), 'CHECK (id = 1)', '') "
            "WHERE type = 'table'"
        )


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    database = tmp_path_factory.mktemp("sealed") / "tracking.db"
    damaging.write_runs(database)
    damaging.into_one_file(database)
    without_rules(database)
    return database


@pytest.fixture(scope="module")
def truth(sealed: pathlib.Path) -> dict[str, Any]:
    return damaging.read_all(sealed)


@pytest.fixture(scope="module")
def unsealed(sealed: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The same as it was recorded before rows had checksums."""
    database = tmp_path_factory.mktemp("unsealed") / "tracking.db"
    shutil.copy(sealed, database)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE schema_version SET version = 1")
    tracking.TrackingReader(database).experiments()
    damaging.into_one_file(database)
    return database


@pytest.fixture(scope="module")
def columns(sealed: pathlib.Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(sealed)) as connection:
        return [(table, row[1]) for table in TABLES for row in connection.execute(f"PRAGMA table_info({table})")]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
documents = st.builds(json.dumps, json_values) | st.builds(
    json.dumps,
    st.fixed_dictionaries({"searcher": json_values})
    | st.fixed_dictionaries({"searcher": st.fixed_dictionaries({"metric": json_values})})
    | st.fixed_dictionaries({"val_loss": json_values}),
)
values = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.binary(max_size=10)
    | documents
    | st.sampled_from(["[" * 100_000, "9" * 5000, "{", "NaN", '{"a": NaN}', "ACTIVE", "DELETED", "COMPLETED"])
)


def change(database: pathlib.Path, table: str, column: str, value: Any) -> None:
    # Of the oldest row, or of all rows: whatever the values of a table allow.
    for rows in ("", f" WHERE rowid = (SELECT min(rowid) FROM {table})"):
        with closing(sqlite3.connect(database)) as connection, connection:
            try:
                connection.execute(f'UPDATE {table} SET "{column}" = ?{rows}', (value,))
                return
            except sqlite3.Error:
                continue


some = settings(deadline=None, max_examples=35, suppress_health_check=[HealthCheck.function_scoped_fixture])


@some
@given(data=st.data(), value=values)
def test_changed_value_is_never_taken_for_what_was_recorded(
    data: st.DataObject,
    value: Any,
    sealed: pathlib.Path,
    truth: dict[str, Any],
    columns: list[tuple[str, str]],
    tmp_path: pathlib.Path,
) -> None:
    database = tmp_path / "tracking.db"
    shutil.copy(sealed, database)
    table, column = data.draw(st.sampled_from([one for one in columns if one != ("schema_version", "version")]))
    change(database, table, column, value)
    assert damaging.wrong(damaging.read_all(database), truth) == []


@pytest.mark.thorough
@some
@given(data=st.data(), value=values)
def test_value_that_nothing_guards_raises_nothing_but_the_own_exception(
    data: st.DataObject, value: Any, unsealed: pathlib.Path, columns: list[tuple[str, str]], tmp_path: pathlib.Path
) -> None:
    database = tmp_path / "tracking.db"
    shutil.copy(unsealed, database)
    change(database, *data.draw(st.sampled_from(columns)), value)
    damaging.read_all(database)
    try:
        with tracking.TrialWriter.attach(database, 1, 1) as recorder:
            recorder.best_validation("val_loss", smaller_is_better=True)
            recorder.write([tracking.ProgressChanged(progress=0.5), tracking.CheckpointDeleted(uuid="0-aaaa")])
    except TrackingException:
        pass


@pytest.mark.parametrize(
    ("table", "column", "value", "said"),
    [
        ("trials", "state", "RUNNING", "row 1 of table 'trials' has 'RUNNING' as 'state'"),
        ("experiments", "state", None, "row 1 of table 'experiments' has None as 'state'"),
        ("experiments", "config", "[1]", r"row 1 of table 'experiments' has '\[1\]' as 'config'"),
        ("experiments", "started", 1e300, r"row 1 of table 'experiments' has 1e\+300 as 'started'"),
        ("trials", "pid", -1, "row 1 of table 'trials' has -1 as 'pid'"),
        ("metrics", "metrics", "[" * 100_000, r"row 1 of table 'metrics' has '\[\["),
        ("checkpoints", "resources", '{"a": "b"}', r"row 1 of table 'checkpoints' has \{'a': 'b'\} as 'resources'"),
        ("checkpoints", "state", "GONE", "row 1 of table 'checkpoints' has 'GONE' as 'state'"),
        ("schema_version", "version", 0, "schema version is 0"),
        ("schema_version", "version", "two", "schema version is 'two'"),
    ],
)
def test_value_that_makes_no_sense_is_named(
    table: str, column: str, value: Any, said: str, unsealed: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    database = tmp_path / "tracking.db"
    shutil.copy(unsealed, database)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(f'UPDATE {table} SET "{column}" = ? WHERE id = 1', (value,))
    records = tracking.TrackingReader(database)
    with pytest.raises(TrackingException, match=said):
        records.checkpoints() if table == "checkpoints" else records.trial(1) and records.experiment(1)


# Values and names that programs report

finite = st.floats(allow_nan=False, allow_infinity=False)
# A text that spells a number which is not finite comes back as that number.
texts = st.text().filter(lambda text: text not in ("NaN", "Infinity", "-Infinity"))
reported = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.lists(finite, max_size=3)
numbers = itertools.count()
names = st.text(min_size=1) | st.text(st.characters(categories=["Cs", "Cc"]), min_size=1)
HOSTILE = ["<script>alert(1)</script>", "'; DROP TABLE metrics; --", "[red]x", "\x1b[2J", "\ud800", "a\0b", "x" * 10**6]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metrics=st.dictionaries(names, reported, max_size=4))
@example(metrics=dict.fromkeys(HOSTILE, 1.0))
@example(metrics={"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "none": None, "huge": 10**2000})
def test_metrics_of_any_name_and_value_are_stored_faithfully(
    metrics: dict[str, Any], recorder: tracking.TrialWriter, records: tracking.TrackingReader
) -> None:
    group = f"group {next(numbers)}"
    recorder.write([tracking.MetricReport(group=group, steps_completed=1, metrics=metrics, time=0.0)])
    (stored,) = records.metrics(recorder.trial_id, group)
    assert repr(dict(stored.metrics)) == repr({joined(name): joined(value) for name, value in metrics.items()})


def joined(value: Any) -> Any:
    """What JSON makes of a text: halves of a character side by side become that character."""
    is_text = isinstance(value, str)
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") if is_text else value


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:20])
def test_experiments_and_hyperparameters_of_any_name_are_stored(
    name: str, database: pathlib.Path, describe_run: Any
) -> None:
    with tracking.TrialWriter.start(
        database, describe_run(name=name, hparams={name: name}, config={name: 1})
    ) as recorder:
        recorder.write([tracking.MetricReport(group=name, steps_completed=1, metrics={"a": 1}, time=0.0)])
    records = tracking.TrackingReader(database)
    assert records.trial(1).hparams == {name: name}
    assert records.experiment(1).config == {name: 1}
    escaped = name.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    assert records.experiment(1).name == escaped
    assert len(records.metrics(1, group=name)) == 1


def test_groups_with_names_that_differ_only_far_out_stay_apart(
    recorder: tracking.TrialWriter, records: tracking.TrackingReader
) -> None:
    groups = ["x" * 10**6 + "a", "x" * 10**6 + "b"]
    for group in groups:
        recorder.write([tracking.MetricReport(group=group, steps_completed=1, metrics={"is": group[-1]}, time=0.0)])
    for group in groups:
        (report,) = records.metrics(recorder.trial_id, group)
        assert report.metrics == {"is": group[-1]}
        assert len(report.group) <= 400
        assert report.group.startswith("x" * 380)
