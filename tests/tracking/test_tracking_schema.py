from __future__ import annotations

import concurrent.futures
import pathlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import schema
from sqlalchemy.dialects import postgresql

from determined import errors, tracking
from determined.tracking import _database, _migrations, _rows, _schema


def _add_labels(connection: sa.Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE experiments ADD COLUMN labels TEXT")


def _fail(connection: sa.Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE experiments ADD COLUMN notes TEXT")
    raise RuntimeError("half way")


@pytest.fixture
def engine(recorder: tracking.Recorder, database: pathlib.Path) -> Iterator[sa.Engine]:
    engine = _database.writing_engine(_database.location(database))
    yield engine
    engine.dispose()


def _version(database: pathlib.Path) -> int:
    with closing(sqlite3.connect(database)) as connection:
        ((version,),) = connection.execute("SELECT version FROM schema_version")
        return int(version)


def _columns(database: pathlib.Path) -> set[str]:
    with closing(sqlite3.connect(database)) as connection:
        return {row[1] for row in connection.execute("PRAGMA table_info(experiments)")}


def test_a_new_database_has_the_newest_version(recorder: tracking.Recorder, database: pathlib.Path) -> None:
    assert _version(database) == len(_migrations.MIGRATIONS)


def test_an_older_database_is_brought_up_to_date_with_its_rows(engine: sa.Engine, database: pathlib.Path) -> None:
    _migrations.migrate(engine, [*_migrations.MIGRATIONS, _add_labels])
    assert _version(database) == len(_migrations.MIGRATIONS) + 1
    assert "labels" in _columns(database)
    with engine.begin() as connection:
        assert connection.execute(sa.select(_schema.experiments.c.name)).scalars().all() == ["digits"]


def test_a_migration_that_fails_leaves_the_version_before_it(engine: sa.Engine, database: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        _migrations.migrate(engine, [*_migrations.MIGRATIONS, _add_labels, _fail])
    assert _version(database) == len(_migrations.MIGRATIONS) + 1
    assert "notes" not in _columns(database)


def test_a_migration_runs_once_when_several_start_at_once(engine: sa.Engine, database: pathlib.Path) -> None:
    migrations = [*_migrations.MIGRATIONS, _add_labels]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: _migrations.migrate(engine, migrations), range(8)))
    assert _version(database) == len(migrations)


@pytest.fixture
def newer(recorder: tracking.Recorder, database: pathlib.Path) -> pathlib.Path:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE schema_version SET version = 99")
    return database


def test_writing_to_a_newer_database_is_refused(newer: pathlib.Path, describe_run: Callable[..., Any]) -> None:
    with pytest.raises(errors.SchemaVersionException, match=r"tracking\.db.*99.*up to 2.*upgrade.*DET_HOME"):
        tracking.Recorder.start(newer, describe_run())


def test_reading_a_newer_database_is_refused(newer: pathlib.Path) -> None:
    with pytest.raises(errors.SchemaVersionException, match=r"tracking\.db.*99"):
        tracking.Records(newer).experiments()


def test_a_database_of_another_program_is_left_alone(tmp_path: pathlib.Path, describe_run: Callable[..., Any]) -> None:
    foreign = tmp_path / "recipes.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE recipes (id INTEGER)")
    with pytest.raises(errors.TrackingException, match=r"another program.*recipes"):
        tracking.Recorder.start(foreign, describe_run())
    with closing(sqlite3.connect(foreign)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("recipes",)]


# A database of version 1, made by the program of that time

VERSION_1 = pathlib.Path(__file__).parents[1] / "data" / "tracking-version-1" / "tracking.db"


@pytest.fixture
def old(database: pathlib.Path) -> pathlib.Path:
    database.parent.mkdir()
    shutil.copy(VERSION_1, database)
    return database


def test_a_database_of_version_1_is_read_as_it_is(old: pathlib.Path) -> None:
    assert _version(old) == 1
    records = tracking.Records(old)
    assert [(one.id, one.name, one.checkpoint_count) for one in records.experiments()] == [
        (2, "digits", 1),
        (1, "digits", 1),
    ]
    assert [(one.group, one.steps_completed) for one in records.history(2)] == [
        ("training", 1),
        ("training", 2),
        ("validation", 2),
        ("training", 3),
    ]
    assert [(one.uuid, one.state.value) for one in records.checkpoints()] == [
        ("aaaa-1", "DELETED"),
        ("bbbb-2", "COMPLETED"),
        ("cccc-3", "COMPLETED"),
    ]
    assert records.trial(1).hparams == {"lr": 0.1}
    assert _version(old) == len(_migrations.MIGRATIONS)


def test_a_run_of_version_1_goes_on_being_recorded(old: pathlib.Path) -> None:
    with tracking.Recorder.attach(old, 2, 2) as recorder:
        recorder.write(
            [
                tracking.MetricReport(group="training", steps_completed=4, metrics={"loss": 0.125}, time=1.0),
                tracking.CheckpointDeleted(uuid="cccc-3"),
                tracking.StateChanged(state=tracking.RunState.COMPLETED, time=2.0),
            ]
        )
    records = tracking.Records(old)
    assert [one.metrics["loss"] for one in records.metrics(2)] == [0.25, 0.125]
    assert records.trial(2).state is tracking.RunState.COMPLETED
    assert records.experiment(2).checkpoint_count == 0


def test_new_rows_beside_those_of_version_1_are_checked(old: pathlib.Path) -> None:
    with tracking.Recorder.attach(old, 2, 2) as recorder:
        recorder.write([tracking.MetricReport(group="training", steps_completed=4, metrics={"a": 1}, time=1.0)])
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("UPDATE metrics SET checksum = NULL")
    with pytest.raises(errors.TrackingException, match="row 5 of table 'metrics' has None as 'checksum'"):
        tracking.Records(old).metrics(2)
    assert len(tracking.Records(old).metrics(1)) == 3


def test_lost_rows_of_version_1_are_noticed(old: pathlib.Path) -> None:
    tracking.Records(old).experiments()
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("DELETE FROM metrics WHERE id = 2")
    with pytest.raises(errors.TrackingException, match="1 metrics of 1, group 'training', where 2 were stored"):
        tracking.Records(old).metrics(1)


def test_every_statement_has_a_form_for_postgresql() -> None:
    dialect = postgresql.dialect()
    for layout in (_rows.EXPERIMENT, _rows.TRIAL, _rows.REPORT, _rows.CHECKPOINT):
        assert "FOR NO KEY UPDATE" in str(layout.select().with_for_update(key_share=True).compile(dialect=dialect))
    for table in _schema.newest.sorted_tables:
        made = str(schema.CreateTable(table).compile(dialect=dialect))
        assert "checksum BIGINT" in made or "mirror BIGINT" in made
