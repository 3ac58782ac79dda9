"""The version of the tracking database, and how an older one is brought up to date."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from determined import errors
from determined.tracking._data.records import score_of, searcher_metric

from . import postgresql, schema
from .connections import (
    ELSEWHERE,
    create_file,
    errors_naming,
    file_of,
    location,
    shown,
    transaction,
    wait_for_turn,
    writing_engine,
)

VERSION = 7
"""The version of the schema that this program writes.

1: experiments, trials, metrics and checkpoints. 2: checksums and counts of rows. 3: managed experiments, slots and
models. 4: identities of processes. 5: claims that expire. 6: no checksums and counts of rows any more, scores of all
validations, leases that expire. 7: clusters.
"""


def version_of(connection: sa.Connection) -> int:
    """Return the version of the schema, 0 where nothing has been created yet; refuse one newer than this program's."""
    tables = set(sa.inspect(connection).get_table_names())
    if schema.schema_version.name in tables:
        return _stored_version(connection)
    if tables:
        raise errors.DatabaseException(
            f"{shown(connection.engine.url)!r} is a database of another program (it has the "
            f"tables {', '.join(sorted(map(str, tables))[:5])}); {ELSEWHERE}."
        )
    if _had_tables(connection):
        raise schema.Damage("its tables are gone")
    return 0


def _stored_version(connection: sa.Connection) -> int:
    version = connection.execute(sa.select(schema.schema_version.c.version)).scalar_one_or_none()
    if type(version) is not int or version < 1:
        raise schema.Damage(f"its schema version is {version!r}")
    if version > VERSION:
        raise errors.SchemaVersionException(
            f"the tracking database {shown(connection.engine.url)!r} has schema version {version}, "
            f"this Resolute knows versions up to {VERSION}; upgrade Resolute (pip install --upgrade "
            f"resolute) or {ELSEWHERE}."
        )
    return version


def _had_tables(connection: sa.Connection) -> bool:
    # SQLite counts the changes of a schema.
    is_sqlite = connection.dialect.name == "sqlite"
    return is_sqlite and connection.exec_driver_sql("PRAGMA schema_version").scalar_one() != 0


@contextlib.contextmanager
def opened(
    url_or_path: str | pathlib.Path | sa.URL, *, creating: bool = False, has_one_connection: bool = False
) -> Iterator[sa.Engine]:
    """Give an engine to write to an up-to-date database with; it is disposed of if what is done with it fails.

    `creating` makes an SQLite file that is not there.
    """
    url = url_or_path if isinstance(url_or_path, sa.URL) else location(url_or_path)
    path = file_of(url)
    if creating and path is not None:
        create_file(path)
    with errors_naming(url):
        engine = writing_engine(url, has_one_connection=has_one_connection)
        try:
            migrate(engine)
            yield engine
        except BaseException:
            engine.dispose()
            raise


def migrate(engine: sa.Engine) -> None:
    """Create the tables, or bring those of an older version up to date, in one transaction.

    Safe when several processes do it at once: each reads the version after the other is done.
    """
    with transaction(engine) as connection:
        wait_for_turn(connection, "migrations", 0)
        version = version_of(connection)
        if not version and file_of(engine.url) is None:
            postgresql.require_usable(connection, shown(engine.url))
        if version < VERSION:
            _use_partial_indexes(connection)
            if version:
                _upgrade(connection)
            schema.metadata.create_all(connection)
            if version:
                _score_local_validations(connection)
            _set_version(connection)


def _use_partial_indexes(connection: sa.Connection) -> None:
    # Not where the indexes are described: to name PostgreSQL there imports its dialect, which SQLite does not need.
    if connection.dialect.name == "postgresql":
        for table in schema.metadata.sorted_tables:
            for index in table.indexes:
                index.dialect_options["postgresql"]["where"] = index.dialect_options["sqlite"]["where"]


def _upgrade(connection: sa.Connection) -> None:
    """Give the tables of an older version the columns and indexes that they have now."""
    inspected = sa.inspect(connection)
    tables = set(inspected.get_table_names())
    if "tallies" in tables:
        connection.exec_driver_sql("DROP TABLE tallies")
    for table in schema.metadata.sorted_tables:
        if table.name in tables:
            present = {column["name"] for column in inspected.get_columns(table.name)}
            found = inspected.get_indexes(table.name)
            indexes = {str(index["name"]) for index in found if not index.get("duplicates_constraint")}
            _upgrade_table(connection, table, present, indexes)


def _upgrade_table(connection: sa.Connection, table: sa.Table, present: set[str], indexes: set[str]) -> None:
    described = {str(index.name): index for index in table.indexes}
    for name in indexes - described.keys():
        connection.exec_driver_sql(f"DROP INDEX {name}")
    if "wish" in present:  # what people want of a trial, up to version 5
        connection.exec_driver_sql(f"ALTER TABLE {table.name} RENAME COLUMN wish TO requested")
        present.add("requested")
    for column in table.columns:
        if column.name not in present:
            connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {_definition(connection, column)}")
    if "checksum" in present:
        connection.exec_driver_sql(f"ALTER TABLE {table.name} DROP COLUMN checksum")
    for name in described.keys() - indexes:
        described[name].create(connection)


def _score_local_validations(connection: sa.Connection) -> None:
    """Give the validations of local experiments what only those of managed ones had up to version 5."""
    metrics, trials, experiments = schema.metrics.c, schema.trials, schema.experiments
    query = sa.select(metrics.id, metrics.metrics, experiments.c.id.label("experiment_id"), experiments.c.config)
    of_local = experiments.c.is_local.is_(True), metrics.group == "validation", metrics.experiment_id.is_(None)
    joined = query.join(trials, trials.c.id == metrics.trial_id).join(experiments)
    for row in connection.execute(joined.where(*of_local)).all():
        searched, _ = searcher_metric(row.config) or (None, True)
        values = {"experiment_id": row.experiment_id, "score": score_of(row.metrics, searched)}
        connection.execute(sa.update(schema.metrics).where(metrics.id == row.id).values(values))


def _definition(connection: sa.Connection, column: sa.Column[Any]) -> str:
    return str(sa.schema.CreateColumn(column).compile(dialect=connection.dialect))


def _set_version(connection: sa.Connection) -> None:
    schema.schema_version.create(connection, checkfirst=True)
    connection.execute(sa.delete(schema.schema_version))
    connection.execute(sa.insert(schema.schema_version).values(id=1, version=VERSION))
