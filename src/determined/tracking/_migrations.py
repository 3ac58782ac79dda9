"""The versions of the tracking database, and the migrations that bring an older one up to date."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import sqlalchemy as sa

from determined import errors

from . import _database, _schema, _tallies
from ._damage import Damage

Migration: TypeAlias = Callable[[sa.Connection], None]


def _create_version_1(connection: sa.Connection) -> None:
    _schema.version_1.create_all(connection, checkfirst=False)


def _add_checks(connection: sa.Connection) -> None:
    """Add checksums, which are missing from the rows that there are, and count those."""
    tallies = _schema.version_2.tables["tallies"]
    for table in _schema.version_2.sorted_tables:
        if table is not tallies:
            _add_columns(connection, table, [table.c.checksum])
            _unseal(connection, table)
    tallies.drop(connection, checkfirst=True)
    tallies.create(connection)
    _tallies.count_all(connection)


def _add_platform(connection: sa.Connection) -> None:
    """Add what driven experiments, slots and models need; the rows that there are keep their checksums."""
    present = set(sa.inspect(connection).get_table_names())
    for table in _schema.version_3.sorted_tables:
        if table.name not in present:
            table.create(connection)
        elif table.name in _schema.version_2.tables:
            _add_columns(connection, table, [column for column in table.columns if column.info.get("is_new")])
            for index in table.indexes:
                index.create(connection, checkfirst=True)
        elif "checksum" in table.columns:
            _unseal(connection, table)
    _tallies.count_new(connection)


def _add_identities(connection: sa.Connection) -> None:
    """Add what tells processes apart; the rows that there are keep their checksums."""
    for table in _schema.NAMING_PROCESSES:
        _add_columns(connection, table, [table.c.identity])


def _add_renewals(connection: sa.Connection) -> None:
    """Add until when runners are alive; claims from before have no end."""
    _add_columns(connection, _schema.runners, [_schema.runners.c.alive_until])


def _add_columns(connection: sa.Connection, table: sa.Table, columns: Iterable[sa.Column[Any]]) -> None:
    present = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
    for column in columns:
        if column.name not in present:
            described = sa.schema.CreateColumn(column).compile(dialect=connection.dialect)
            connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {described}")


def _unseal(connection: sa.Connection, table: sa.Table) -> None:
    connection.execute(sa.update(table).where(table.c.checksum.is_not(None)).values(checksum=None))


# A database that is set back to version 1 by hand is accepted as it is: its rows are no longer checked.
MIGRATIONS: tuple[Migration, ...] = (_create_version_1, _add_checks, _add_platform, _add_identities, _add_renewals)


def version_of(connection: sa.Connection) -> int:
    """Return the version of the schema, 0 where nothing has been created yet."""
    tables = set(sa.inspect(connection).get_table_names())
    if _schema.schema_version.name in tables:
        version = connection.execute(sa.select(_schema.schema_version.c.version)).scalar_one_or_none()
        if type(version) is not int or version < 1:
            raise Damage(f"its schema version is {version!r}")
        return version
    if tables:
        raise errors.TrackingException(
            f"{_database.shown(connection.engine.url)!r} is a database of another program (it has the "
            f"tables {', '.join(sorted(map(str, tables))[:5])}); {_database.ELSEWHERE}."
        )
    if _had_tables(connection):
        raise Damage("its tables are gone")
    return 0


def _had_tables(connection: sa.Connection) -> bool:
    # SQLite counts the changes of a schema.
    is_sqlite = connection.dialect.name == "sqlite"
    return is_sqlite and connection.exec_driver_sql("PRAGMA schema_version").scalar_one() != 0


def check_version(connection: sa.Connection, supported: int = len(MIGRATIONS)) -> int:
    """Return the version of the schema; refuse one that is newer than this program knows."""
    version = version_of(connection)
    if version > supported:
        raise errors.SchemaVersionException(
            f"the tracking database {_database.shown(connection.engine.url)!r} has schema version {version}, "
            f"this Resolute knows versions up to {supported}; upgrade Resolute (pip install --upgrade "
            f"resolute) or {_database.ELSEWHERE}."
        )
    return version


@contextlib.contextmanager
def opened(
    url_or_path: str | pathlib.Path | sa.URL, *, creating: bool = False, has_one_connection: bool = False
) -> Iterator[sa.Engine]:
    """Give an engine to write to an up-to-date database with; it is disposed of if what is done with it fails.

    `creating` makes an SQLite file that is not there.
    """
    url = url_or_path if isinstance(url_or_path, sa.URL) else _database.location(url_or_path)
    path = _database.file_of(url)
    if creating and path is not None:
        _database.create_file(path)
    with _database.errors_naming(url):
        engine = _database.writing_engine(url, has_one_connection=has_one_connection)
        try:
            migrate(engine)
            yield engine
        except BaseException:
            engine.dispose()
            raise


def migrate(engine: sa.Engine, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the database to the newest version: pending migrations in order, a transaction each.

    Safe when several processes do it at once: the version is read by one after the other.
    """
    while _migrate_once(engine, migrations) < len(migrations):
        pass


def _migrate_once(engine: sa.Engine, migrations: Sequence[Migration]) -> int:
    with engine.begin() as connection:
        _database.wait_for_turn(connection, "migrations", 0)
        version = check_version(connection, supported=len(migrations))
        if version < len(migrations):
            migrations[version](connection)
            version += 1
            _set_version(connection, version)
        return version


def _set_version(connection: sa.Connection, version: int) -> None:
    _schema.schema_version.create(connection, checkfirst=True)
    connection.execute(sa.delete(_schema.schema_version))
    connection.execute(sa.insert(_schema.schema_version).values(id=1, version=version))
