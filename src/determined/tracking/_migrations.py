"""The versions of the tracking database, and the migrations that bring an older one up to date."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import sqlalchemy as sa

from determined import errors

from . import _database, _schema, _tallies
from ._damage import Damage

Migration: TypeAlias = Callable[[sa.Connection], None]


def _create_version_1(connection: sa.Connection) -> None:
    _schema.version_1.create_all(connection, checkfirst=False)


def _add_checks(connection: sa.Connection) -> None:
    """Add checksums, which are missing from the rows that there are, and count those."""
    for table in (_schema.experiments, _schema.trials, _schema.metrics, _schema.checkpoints):
        if "checksum" not in {column["name"] for column in sa.inspect(connection).get_columns(table.name)}:
            connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN checksum BIGINT")
        connection.execute(sa.update(table).where(table.c.checksum.is_not(None)).values(checksum=None))
    _schema.tallies.drop(connection, checkfirst=True)
    _schema.tallies.create(connection)
    _tallies.count_all(connection)


# A database that is set back to version 1 by hand is accepted as it is: its rows are no longer checked.
MIGRATIONS: tuple[Migration, ...] = (_create_version_1, _add_checks)


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


def migrate(engine: sa.Engine, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the database to the newest version: pending migrations in order, a transaction each.

    Safe when several processes do it at once: the version is read under the write lock.
    """
    while _migrate_once(engine, migrations) < len(migrations):
        pass


def _migrate_once(engine: sa.Engine, migrations: Sequence[Migration]) -> int:
    with engine.begin() as connection:
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
