from __future__ import annotations

import concurrent.futures
import pathlib
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

from determined import errors, tracking
from determined.tracking import _database, _schema


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
    assert _version(database) == len(_schema.MIGRATIONS)


def test_an_older_database_is_brought_up_to_date_with_its_rows(engine: sa.Engine, database: pathlib.Path) -> None:
    _schema.migrate(engine, [*_schema.MIGRATIONS, _add_labels])
    assert _version(database) == len(_schema.MIGRATIONS) + 1
    assert "labels" in _columns(database)
    with engine.begin() as connection:
        assert connection.execute(sa.select(_schema.experiments.c.name)).scalars().all() == ["digits"]


def test_a_migration_that_fails_leaves_the_version_before_it(engine: sa.Engine, database: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        _schema.migrate(engine, [*_schema.MIGRATIONS, _add_labels, _fail])
    assert _version(database) == len(_schema.MIGRATIONS) + 1
    assert "notes" not in _columns(database)


def test_a_migration_runs_once_when_several_start_at_once(engine: sa.Engine, database: pathlib.Path) -> None:
    migrations = [*_schema.MIGRATIONS, _add_labels]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: _schema.migrate(engine, migrations), range(8)))
    assert _version(database) == len(migrations)


@pytest.fixture
def newer(recorder: tracking.Recorder, database: pathlib.Path) -> pathlib.Path:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE schema_version SET version = 99")
    return database


def test_writing_to_a_newer_database_is_refused(newer: pathlib.Path, describe_run: Callable[..., Any]) -> None:
    with pytest.raises(errors.SchemaVersionException, match=r"tracking\.db.*99.*up to 1.*upgrade.*DET_HOME"):
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
