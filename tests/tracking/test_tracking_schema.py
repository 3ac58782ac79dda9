from __future__ import annotations

import concurrent.futures
import pathlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import driving
import pytest
import sqlalchemy as sa
from sqlalchemy import schema
from sqlalchemy.dialects import postgresql

from determined import errors, tracking
from determined.tracking import _database, _migrations, _rows, _schema


def _add_color(connection: sa.Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE experiments ADD COLUMN color TEXT")


def _fail(connection: sa.Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE experiments ADD COLUMN smell TEXT")
    raise RuntimeError("half way")


@pytest.fixture
def engine(recorder: tracking.TrialWriter, database: pathlib.Path) -> Iterator[sa.Engine]:
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


def test_a_new_database_has_the_newest_version(recorder: tracking.TrialWriter, database: pathlib.Path) -> None:
    assert _version(database) == len(_migrations.MIGRATIONS)


def test_an_older_database_is_brought_up_to_date_with_its_rows(engine: sa.Engine, database: pathlib.Path) -> None:
    _migrations.migrate(engine, [*_migrations.MIGRATIONS, _add_color])
    assert _version(database) == len(_migrations.MIGRATIONS) + 1
    assert "color" in _columns(database)
    with engine.begin() as connection:
        assert connection.execute(sa.select(_schema.experiments.c.name)).scalars().all() == ["digits"]


def test_a_migration_that_fails_leaves_the_version_before_it(engine: sa.Engine, database: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        _migrations.migrate(engine, [*_migrations.MIGRATIONS, _add_color, _fail])
    assert _version(database) == len(_migrations.MIGRATIONS) + 1
    assert "smell" not in _columns(database)


def test_a_migration_runs_once_when_several_start_at_once(engine: sa.Engine, database: pathlib.Path) -> None:
    migrations = [*_migrations.MIGRATIONS, _add_color]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: _migrations.migrate(engine, migrations), range(8)))
    assert _version(database) == len(migrations)


@pytest.fixture
def newer(recorder: tracking.TrialWriter, database: pathlib.Path) -> pathlib.Path:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE schema_version SET version = 99")
    return database


def test_writing_to_a_newer_database_is_refused(newer: pathlib.Path, describe_run: Callable[..., Any]) -> None:
    with pytest.raises(errors.SchemaVersionException, match=r"tracking\.db.*99.*up to 5.*upgrade.*DET_HOME"):
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


# A database of version 1, made by the program of that time

VERSION_1 = pathlib.Path(__file__).parents[1] / "data" / "tracking-version-1" / "tracking.db"


@pytest.fixture
def old(database: pathlib.Path) -> pathlib.Path:
    database.parent.mkdir()
    shutil.copy(VERSION_1, database)
    return database


def test_a_database_of_version_1_is_read_as_it_is(old: pathlib.Path) -> None:
    assert _version(old) == 1
    records = tracking.TrackingReader(old)
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
    with tracking.TrialWriter.attach(old, 2, 2) as recorder:
        recorder.write(
            [
                tracking.MetricReport(group="training", steps_completed=4, metrics={"loss": 0.125}, time=1.0),
                tracking.CheckpointDeleted(uuid="cccc-3"),
                tracking.StateChanged(state=tracking.RunState.COMPLETED, time=2.0),
            ]
        )
    records = tracking.TrackingReader(old)
    assert [one.metrics["loss"] for one in records.metrics(2)] == [0.25, 0.125]
    assert records.trial(2).state is tracking.RunState.COMPLETED
    assert records.experiment(2).checkpoint_count == 0


def test_new_rows_beside_those_of_version_1_are_checked(old: pathlib.Path) -> None:
    with tracking.TrialWriter.attach(old, 2, 2) as recorder:
        recorder.write([tracking.MetricReport(group="training", steps_completed=4, metrics={"a": 1}, time=1.0)])
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("UPDATE metrics SET checksum = NULL")
    with pytest.raises(errors.TrackingException, match="row 5 of table 'metrics' has None as 'checksum'"):
        tracking.TrackingReader(old).metrics(2)
    assert len(tracking.TrackingReader(old).metrics(1)) == 3


def test_lost_rows_of_version_1_are_noticed(old: pathlib.Path) -> None:
    tracking.TrackingReader(old).experiments()
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("DELETE FROM metrics WHERE id = 2")
    with pytest.raises(errors.TrackingException, match="1 metrics of 1, group 'training', where 2 were stored"):
        tracking.TrackingReader(old).metrics(1)


# A database of version 2, made by the program of that time

VERSION_2 = VERSION_1.parents[1] / "tracking-version-2" / "tracking.db"


@pytest.fixture
def sealed(database: pathlib.Path) -> pathlib.Path:
    """A database of version 2, whose rows have checksums."""
    database.parent.mkdir()
    shutil.copy(VERSION_2, database)
    return database


def test_a_database_of_version_2_is_read_as_it_is(sealed: pathlib.Path) -> None:
    assert _version(sealed) == 2
    records = tracking.TrackingReader(sealed)
    assert [(one.id, one.name, one.checkpoint_count) for one in records.experiments()] == [
        (2, "digits", 1),
        (1, "digits", 1),
    ]
    assert _version(sealed) == len(_migrations.MIGRATIONS)
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
    trial = records.trial(2)
    assert (trial.hparams, trial.metadata, trial.progress) == ({"lr": 0.1, "note": "é😀"}, {"tag": "x"}, 0.5)
    assert (trial.request_id, trial.run_id, trial.restarts, trial.wish) == (None, 0, 0, None)
    experiment = records.experiment(1)
    assert (experiment.labels, experiment.description, experiment.is_archived, experiment.is_local) == (
        (),
        None,
        False,
        True,
    )


def test_rows_of_version_2_keep_their_checksums(sealed: pathlib.Path) -> None:
    def checksums() -> list[tuple[int, ...]]:
        tables = ("experiments", "trials", "metrics", "checkpoints")
        with closing(sqlite3.connect(sealed)) as connection:
            return [row for table in tables for row in connection.execute(f"SELECT id, checksum FROM {table}")]

    before = checksums()
    tracking.TrackingReader(sealed).experiments()
    assert checksums() == before
    assert None not in {checksum for _, checksum in before}


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE metrics SET time = 1.0 WHERE id = 2", "row 2 of table 'metrics'.*checksum"),
        ("UPDATE metrics SET run_id = 1 WHERE id = 2", "row 2 of table 'metrics'.*checksum"),
        ("UPDATE trials SET restarts = 0 WHERE id = 1", "row 1 of table 'trials'.*checksum"),
        ("UPDATE experiments SET archived = 0 WHERE id = 1", "row 1 of table 'experiments'.*checksum"),
        ("DELETE FROM metrics WHERE id = 2", "1 metrics of 1, group 'training', where 2 were stored"),
    ],
)
def test_damage_to_what_version_2_wrote_is_noticed_after_the_migration(
    statement: str, said: str, sealed: pathlib.Path
) -> None:
    tracking.TrackingReader(sealed).experiments()
    with closing(sqlite3.connect(sealed)) as connection, connection:
        connection.execute(statement)
    records = tracking.TrackingReader(sealed)
    with pytest.raises(errors.TrackingException, match=said):
        records.experiment(1), records.trial(1), records.metrics(1)


def test_damage_from_before_the_migration_is_noticed_after_it(sealed: pathlib.Path) -> None:
    with closing(sqlite3.connect(sealed)) as connection, connection:
        connection.execute("UPDATE metrics SET time = 1.0 WHERE id = 2")
    with pytest.raises(errors.TrackingException, match=r"row 2 of table 'metrics'.*checksum"):
        tracking.TrackingReader(sealed).metrics(1)
    assert len(tracking.TrackingReader(sealed).metrics(2)) == 1


# A database of version 3, made by the program of that time

VERSION_3 = VERSION_1.parents[1] / "tracking-version-3" / "tracking.db"


def test_processes_of_version_3_are_known_by_their_host_and_start(database: pathlib.Path) -> None:
    database.parent.mkdir()
    shutil.copy(VERSION_3, database)
    records = tracking.TrackingReader(database)
    process = tracking.RunProcess(pid=4242, started=1000.0, host="elsewhere")
    assert records.experiment(3).runner == records.trial(3).process == process
    assert not process.is_here
    with tracking.Slots(database, "elsewhere") as slots:
        assert [lease.process for lease in slots.held()] == [process]


@pytest.mark.parametrize("kept", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_an_older_database_takes_everything_new(
    kept: pathlib.Path, database: pathlib.Path, describe_run: Callable[..., Any]
) -> None:
    database.parent.mkdir()
    shutil.copy(kept, database)
    with tracking.TrialWriter.attach(database, 2, 2) as recorder:
        recorder.write(
            [
                tracking.MetricReport(group="training", steps_completed=4, metrics={"loss": 0.125}, time=1.0),
                tracking.StateChanged(state=tracking.RunState.COMPLETED, time=2.0),
            ]
        )
    with driving.claimed(database) as ledger:
        (id,) = driving.add_trials(ledger)
        with tracking.TrialWriter.attach(database, 3, id, 1) as recorder:
            recorder.write([driving.report(1, loss=0.5)])
        ledger.commit(tracking.Changeset(events=[driving.event(1)]))
        assert (id, len(ledger.validations()), len(ledger.events())) == (3, 1, 1)
    tracking.Catalog(database).change_experiment(2, labels=["kept"], archived=True)
    registry = tracking.Registry(database)
    registry.create_model("digits")
    registry.register_version("digits", "cccc-3")
    records = tracking.TrackingReader(database)
    assert [one.labels for one in records.experiments(include_archived=True)] == [(), ("kept",), ()]
    assert [one.metrics["loss"] for one in records.metrics(2)] == [0.25, 0.125]
    assert records.registered_checkpoints() == {"cccc-3"}


def _shape(connection: sa.Connection) -> dict[str, Any]:
    inspected = sa.inspect(connection)
    tables = sorted(set(inspected.get_table_names()) - {"schema_version"})
    return {name: [str(schema.CreateColumn(column)) for column in _described(connection, name)] for name in tables}


def _described(connection: sa.Connection, name: str) -> list[sa.Column[Any]]:
    return list(sa.Table(name, sa.MetaData(), autoload_with=connection).columns)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_description_of_an_old_version_is_what_its_program_made(
    version: int, tmp_path: pathlib.Path, old: pathlib.Path
) -> None:
    """So that whoever changes the newest description does not change how databases are built up."""
    shutil.copy({1: VERSION_1, 2: VERSION_2, 3: VERSION_3}[version], old)
    made = _database.writing_engine(_database.location(old))
    path = tmp_path / "described.db"
    _database.create_file(path)
    described = _database.writing_engine(_database.location(path))
    _migrations.migrate(described, _migrations.MIGRATIONS[:version])
    try:
        with made.begin() as one, described.begin() as other:
            assert _shape(one) == _shape(other)
    finally:
        made.dispose()
        described.dispose()


@pytest.mark.parametrize("kept", [VERSION_2, VERSION_3], ids=["version 2", "version 3"])
def test_a_new_database_has_the_shape_of_a_migrated_one(
    kept: pathlib.Path, engine: sa.Engine, tmp_path: pathlib.Path
) -> None:
    shutil.copy(kept, tmp_path / "old.db")
    tracking.TrackingReader(tmp_path / "old.db").experiments()
    migrated = _database.writing_engine(_database.location(tmp_path / "old.db"))
    try:
        with engine.begin() as one, migrated.begin() as other:
            assert _shape(one) == _shape(other)
            assert {name: len(columns) for name, columns in _shape(one).items()} == {
                table.name: len(table.columns) for table in _schema.newest.sorted_tables
            }
    finally:
        migrated.dispose()


def test_every_statement_has_a_form_for_postgresql() -> None:
    dialect = postgresql.dialect()
    for layout in (_rows.EXPERIMENT, _rows.TRIAL, _rows.REPORT, _rows.CHECKPOINT, _rows.RUN, _rows.RUNNER):
        assert "FOR NO KEY UPDATE" in str(layout.select().with_for_update(key_share=True).compile(dialect=dialect))
    for table in _schema.newest.sorted_tables:
        made = str(schema.CreateTable(table).compile(dialect=dialect))
        assert "checksum BIGINT" in made or table.name in ("tallies", "leases")
        for index in table.indexes:
            assert f"INDEX {index.name} ON {table.name}" in str(schema.CreateIndex(index).compile(dialect=dialect))
