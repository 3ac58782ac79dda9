from __future__ import annotations

import concurrent.futures
import pathlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import driving
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable

from determined import errors, tracking
from determined.tracking._database import connections, migrations, schema

pytestmark = pytest.mark.usefixtures("on_a_file")


@pytest.fixture
def engine(writer: tracking.TrialWriter, database: pathlib.Path) -> Iterator[sa.Engine]:
    engine = connections.writing_engine(connections.location(database))
    yield engine
    engine.dispose()


def _version(database: pathlib.Path) -> int:
    with closing(sqlite3.connect(database)) as connection:
        ((version,),) = connection.execute("SELECT version FROM schema_version")
        return int(version)


DATA = pathlib.Path(__file__).parents[1] / "data"
OLD = [1, 2, 3, 4, 5]


def _copy(version: int, database: pathlib.Path) -> pathlib.Path:
    """A database of an older version, made by the program of that time."""
    database.parent.mkdir(exist_ok=True)
    shutil.copy(DATA / f"tracking-version-{version}" / "tracking.db", database)
    assert _version(database) == version
    return database


def test_a_new_database_has_the_newest_version(writer: tracking.TrialWriter, database: pathlib.Path) -> None:
    assert _version(database) == migrations.VERSION


@pytest.mark.parametrize("version", OLD)
def test_an_older_database_is_migrated_once_when_several_start_at_once(version: int, database: pathlib.Path) -> None:
    _copy(version, database)

    def migrate(_: int) -> None:
        engine = connections.writing_engine(connections.location(database))
        try:
            migrations.migrate(engine)
        finally:
            engine.dispose()

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(migrate, range(8)))
    assert _version(database) == migrations.VERSION


def test_a_migration_that_fails_leaves_the_database_as_it_was(database: pathlib.Path) -> None:
    _copy(5, database)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE VIEW mine AS SELECT checksum FROM versions")
    with closing(sqlite3.connect(database)) as connection:
        before = list(connection.iterdump())
    with pytest.raises(errors.DatabaseException, match=r"tracking\.db.*view mine"):
        tracking.TrackingReader(database).experiments()
    with closing(sqlite3.connect(database)) as connection:
        assert list(connection.iterdump()) == before


@pytest.fixture
def newer(writer: tracking.TrialWriter, database: pathlib.Path) -> pathlib.Path:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE schema_version SET version = 99")
    return database


def test_writing_to_a_newer_database_is_refused(newer: pathlib.Path, describe_run: Callable[..., Any]) -> None:
    with pytest.raises(
        errors.SchemaVersionException, match=rf"tracking\.db.*99.*up to {migrations.VERSION}.*upgrade.*DET_HOME"
    ):
        tracking.TrialWriter.start(newer, describe_run())


def test_reading_a_newer_database_is_refused(newer: pathlib.Path) -> None:
    with pytest.raises(errors.SchemaVersionException, match=r"tracking\.db.*99"):
        tracking.TrackingReader(newer).experiments()


def test_a_database_of_another_program_is_left_alone(tmp_path: pathlib.Path, describe_run: Callable[..., Any]) -> None:
    foreign = tmp_path / "recipes.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE recipes (id INTEGER)")
    with pytest.raises(errors.TrackingException, match=r"another program.*recipes"):
        tracking.TrialWriter.start(foreign, describe_run())
    with closing(sqlite3.connect(foreign)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("recipes",)]


# Databases of older versions


@pytest.fixture
def old(database: pathlib.Path) -> pathlib.Path:
    return _copy(1, database)


def test_a_database_of_version_1_is_read_as_it_is(old: pathlib.Path) -> None:
    reader = tracking.TrackingReader(old)
    assert [(one.id, one.name, one.checkpoint_count) for one in reader.experiments()] == [
        (2, "digits", 1),
        (1, "digits", 1),
    ]
    assert [(one.group, one.steps_completed) for one in reader.history(2)] == [
        ("training", 1),
        ("training", 2),
        ("validation", 2),
        ("training", 3),
    ]
    assert [(one.uuid, one.state.value) for one in reader.checkpoints()] == [
        ("aaaa-1", "DELETED"),
        ("bbbb-2", "COMPLETED"),
        ("cccc-3", "COMPLETED"),
    ]
    assert reader.trial(1).hparams == {"lr": 0.1}
    assert _version(old) == migrations.VERSION


def test_a_run_of_version_1_goes_on_being_recorded(old: pathlib.Path) -> None:
    with tracking.TrialWriter.attach(old, 2, 2) as writer:
        writer.write(
            [
                tracking.MetricReport(group="training", steps_completed=4, metrics={"loss": 0.125}, time=1.0),
                tracking.CheckpointDeleted(uuid="cccc-3"),
                tracking.StateChanged(state=tracking.RunState.COMPLETED, time=2.0),
            ]
        )
    reader = tracking.TrackingReader(old)
    assert [one.metrics["loss"] for one in reader.metrics(2)] == [0.25, 0.125]
    assert reader.trial(2).state is tracking.RunState.COMPLETED
    assert reader.experiment(2).checkpoint_count == 0


def test_a_database_of_version_2_is_read_as_it_is(database: pathlib.Path) -> None:
    reader = tracking.TrackingReader(_copy(2, database))
    assert [(one.id, one.name, one.checkpoint_count) for one in reader.experiments()] == [
        (2, "digits", 1),
        (1, "digits", 1),
    ]
    assert _version(database) == migrations.VERSION
    assert [(one.group, one.steps_completed) for one in reader.history(2)] == [
        ("training", 1),
        ("training", 2),
        ("validation", 2),
        ("training", 3),
    ]
    assert [(one.uuid, one.state.value) for one in reader.checkpoints()] == [
        ("aaaa-1", "DELETED"),
        ("bbbb-2", "COMPLETED"),
        ("cccc-3", "COMPLETED"),
    ]
    trial = reader.trial(2)
    assert (trial.hparams, trial.metadata, trial.progress) == ({"lr": 0.1, "note": "é😀"}, {"tag": "x"}, 0.5)
    assert (trial.request_id, trial.run_id, trial.restarts, trial.requested) == (None, 0, 0, None)
    experiment = reader.experiment(1)
    assert (experiment.labels, experiment.description, experiment.is_archived, experiment.is_local) == (
        (),
        None,
        False,
        True,
    )


def test_processes_of_version_3_are_known_by_their_host_and_start(database: pathlib.Path) -> None:
    reader = tracking.TrackingReader(_copy(3, database))
    process = tracking.RunProcess(pid=4242, started=1000.0, host="elsewhere")
    assert reader.experiment(3).runner == reader.trial(3).process == process
    assert not process.is_here
    with tracking.Slots(database, "elsewhere") as slots:
        assert [lease.process for lease in slots.held()] == [process]


@pytest.mark.parametrize("version", [4, 5])
def test_a_managed_experiment_of_an_older_version_goes_on(version: int, database: pathlib.Path) -> None:
    reader = tracking.TrackingReader(_copy(version, database))
    process = tracking.RunProcess(pid=4242, started=1000.0, host="elsewhere")
    experiment = reader.experiment(2)
    assert (experiment.labels, experiment.priority, experiment.runner) == (("a",), 3, process)
    assert [one.checkpoint_count for one in reader.experiments()] == [2, 1]
    best_of_local = tracking.BestValidation(metric="loss", value=0.75, steps_completed=1)
    assert reader.trial(1).best_validation == best_of_local
    with tracking.ExperimentStore.open(database, 2) as store:
        assert [(one.id, one.trial_id) for one in store.validations()] == [(n, 2 + (n > 3)) for n in range(1, 7)]
        assert len(store.events()) == 2
        assert store.snapshot() == tracking.Snapshot(number=2, state={"a": [1]})
        assert store.control().requests == {2: tracking.TrialRequest.STOP}
        best = store.best()
        assert best is not None
        assert (best.trial_id, best.steps_completed) == (2, 3), "what the second run of trial 3 replaces is left out"
        store.claim(force=True)
        store.commit(tracking.Changeset(events=[driving.event(3)], new_trials=[driving.new_trial("r3")]))
        with tracking.TrialWriter.attach(database, 2, 3, 2) as writer:
            writer.write([driving.report(3, loss=0.125)])
        assert [one.id for one in store.validations(after_id=6)] == [7]
    assert [one.steps_completed for one in reader.metrics(3)] == [1, 2, 3]
    assert reader.registered_checkpoints() == {"bbbb-2"}
    with tracking.Slots(database, "elsewhere") as slots:
        assert [lease.process for lease in slots.held()] == [process]


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_database_takes_everything_new(
    version: int, database: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    _copy(version, database)
    with tracking.TrialWriter.attach(database, 2, 2) as writer:
        writer.write(
            [
                tracking.MetricReport(group="training", steps_completed=4, metrics={"loss": 0.125}, time=1.0),
                tracking.StateChanged(state=tracking.RunState.COMPLETED, time=2.0),
            ]
        )
    with driving.claimed(database) as store:
        (id,) = driving.add_trials(store)
        with tracking.TrialWriter.attach(database, 3, id, 1) as writer:
            writer.write([driving.report(1, loss=0.5)])
        store.commit(tracking.Changeset(events=[driving.event(1)]))
        assert (id, len(store.validations()), len(store.events())) == (3, 1, 1)
    tracking.Catalog(database).change_experiment(2, labels=["kept"], archived=True)
    registry = tracking.Registry(database)
    registry.create_model("digits")
    registry.register_version("digits", "cccc-3")
    reader = tracking.TrackingReader(database)
    assert [one.labels for one in reader.experiments(include_archived=True)] == [(), ("kept",), ()]
    assert [one.metrics["loss"] for one in reader.metrics(2)] == [0.25, 0.125]
    assert reader.registered_checkpoints() == {"cccc-3"}


def _shape(connection: sa.Connection) -> dict[str, Any]:
    inspected = sa.inspect(connection)
    tables = sorted(set(inspected.get_table_names()) - {"schema_version"})
    return {
        name: (
            [str(CreateColumn(column)) for column in _described(connection, name)],
            sorted((index["name"], index["column_names"]) for index in inspected.get_indexes(name)),
        )
        for name in tables
    }


def _described(connection: sa.Connection, name: str) -> list[sa.Column[Any]]:
    return list(sa.Table(name, sa.MetaData(), autoload_with=connection).columns)


@pytest.mark.parametrize("version", OLD)
def test_a_new_database_has_the_shape_of_a_migrated_one(
    version: int, engine: sa.Engine, tmp_path: pathlib.Path
) -> None:
    old = _copy(version, tmp_path / "old" / "tracking.db")
    tracking.TrackingReader(old).experiments()
    migrated = connections.writing_engine(connections.location(old))
    try:
        with engine.begin() as one, migrated.begin() as other:
            assert _shape(one) == _shape(other)
            assert {name: len(columns) for name, (columns, _) in _shape(one).items()} == {
                table.name: len(table.columns) for table in schema.metadata.sorted_tables
            }
    finally:
        migrated.dispose()


def test_every_table_has_a_form_for_postgresql() -> None:
    dialect = postgresql.dialect()
    for table in schema.metadata.sorted_tables:
        assert f"CREATE TABLE {table.name}" in str(CreateTable(table).compile(dialect=dialect))
        for index in table.indexes:
            assert f"INDEX {index.name} ON {table.name}" in str(CreateIndex(index).compile(dialect=dialect))


def test_sqlite_does_not_load_the_dialect_of_postgresql() -> None:
    check = (
        "import sys, determined.tracking as t; t.TrackingReader('missing.db').experiments(); "
        "sys.exit('sqlalchemy.dialects.postgresql' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=120).returncode == 0
