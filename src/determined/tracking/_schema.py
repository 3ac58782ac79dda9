"""The tables of the tracking database and the migrations that bring an older one up to date."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy import types

from determined import errors

from . import _database
from ._json import decode_json, encode_json


class JsonText(types.TypeDecorator[Any]):
    """Any value as JSON text; None is NULL."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        """Return the text to store."""
        return None if value is None else encode_json(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:
        """Return the value that was stored."""
        return None if value is None else decode_json(value)


class AnyText(types.TypeDecorator[str]):
    """Text from anywhere: what a database refuses (lone surrogates, NUL) is stored as an escape."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """Return the text to store."""
        if value is None:
            return None
        return str(value).encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _experiments(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "experiments",
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", AnyText, nullable=False),
        sa.Column("config", JsonText),
        sa.Column("is_local", sa.Boolean, nullable=False),  # its one trial's state is its state
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("progress", sa.Float),
        sa.Column("started", sa.Float, nullable=False),
        sa.Column("ended", sa.Float),
        # Ids name folders of TensorBoard files: one that was deleted must not come back.
        sqlite_autoincrement=True,
    )


def _trials(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "trials",
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("experiment_id", sa.ForeignKey("experiments.id"), nullable=False, index=True),
        sa.Column("hparams", JsonText, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("entrypoint", AnyText, nullable=False),
        sa.Column("torch_version", AnyText),
        sa.Column("resolute_version", AnyText, nullable=False),
        sa.Column("git_commit", AnyText),
        sa.Column("pid", sa.BigInteger, nullable=False),
        sa.Column("process_started", sa.Float, nullable=False),
        sa.Column("host", AnyText, nullable=False),
        sa.Column("source_checkpoint", AnyText),
        sa.Column("source_steps_completed", sa.BigInteger),
        sa.Column("source_reported_steps", sa.BigInteger),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", AnyText),
        sa.Column("status", AnyText),
        sa.Column("progress", sa.Float),
        sa.Column("metadata", JsonText),
        sa.Column("started", sa.Float, nullable=False),
        sa.Column("ended", sa.Float),
        sqlite_autoincrement=True,
    )


def _metrics(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "metrics",
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("trial_id", sa.ForeignKey("trials.id"), nullable=False),
        sa.Column("group", AnyText, nullable=False),
        sa.Column("steps_completed", sa.BigInteger, nullable=False),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("metrics", JsonText, nullable=False),
        sa.Index("metrics_by_step", "trial_id", "group", "steps_completed"),
    )


def _checkpoints(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "checkpoints",
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("uuid", AnyText, nullable=False, unique=True),
        sa.Column("trial_id", sa.ForeignKey("trials.id"), nullable=False, index=True),
        sa.Column("steps_completed", sa.BigInteger, nullable=False),
        sa.Column("path", AnyText, nullable=False),
        sa.Column("metadata", JsonText, nullable=False),
        sa.Column("resources", JsonText, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("time", sa.Float, nullable=False),
    )


# What migration 1 creates must never change. Version 2 gets a migration that alters these tables and
# a description of its own for the queries.
_version_1 = sa.MetaData()
experiments = _experiments(_version_1)
trials = _trials(_version_1)
metrics = _metrics(_version_1)
checkpoints = _checkpoints(_version_1)

_versions = sa.MetaData()
schema_version = sa.Table(
    "schema_version",
    _versions,
    sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1"), primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)

Migration: TypeAlias = Callable[[sa.Connection], None]


def _create_version_1(connection: sa.Connection) -> None:
    _version_1.create_all(connection, checkfirst=False)


MIGRATIONS: tuple[Migration, ...] = (_create_version_1,)


def version_of(connection: sa.Connection) -> int:
    """Return the version of the schema, 0 where nothing has been created yet."""
    tables = set(sa.inspect(connection).get_table_names())
    if schema_version.name in tables:
        return connection.execute(sa.select(schema_version.c.version)).scalar_one_or_none() or 0
    if tables:
        raise errors.TrackingException(
            f"{_database.shown(connection.engine.url)!r} is a database of another program (it has the "
            f"tables {', '.join(sorted(tables)[:5])}); {_database.ELSEWHERE}."
        )
    return 0


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
    schema_version.create(connection, checkfirst=True)
    connection.execute(sa.delete(schema_version))
    connection.execute(sa.insert(schema_version).values(id=1, version=version))
