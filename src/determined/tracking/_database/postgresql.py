"""What is particular to PostgreSQL: connections, transactions that were cut off, and what to do about errors."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from determined import errors
from determined.tracking._data.room import is_away_for_now

logger = logging.getLogger("determined.tracking")

DRIVER = "postgresql+psycopg"
MIN_VERSION = 13
# A server or a network that says nothing is noticed within half a minute, on both sides. A process that is frozen in a
# transaction does not keep others from writing for longer than a minute.
_CONNECTION: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "application_name": "resolute",
    "options": "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3 "
    "-c idle_in_transaction_session_timeout=60000 -c timezone=UTC",
}
_RETRY_S = 0.2
_HANGING_TIMEOUT_S = 1.0
"""Seconds after which a transaction of a lost connection that neither ends nor fails is ended."""
_TRANSACTION = sa.text("SELECT CAST(pg_current_xact_id() AS TEXT)")
_SNAPSHOT = sa.text("SELECT CAST(pg_current_snapshot() AS TEXT)")
_STATUS = sa.text("SELECT pg_xact_status(CAST(:id AS xid8))")
_END = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND CAST(backend_xid AS TEXT) = CAST(CAST(CAST(:id AS xid8) AS xid) AS TEXT)"
)
_OUT_OF_RANGE = "22003"
_UNKNOWN_TRANSACTION = "22023"  # as on a server that a backup was restored to


def engine(url: sa.URL, **options: Any) -> sa.Engine:
    """Return an engine; what the URL itself says about connections holds."""
    given = {name: value for name, value in _CONNECTION.items() if name not in url.query}
    # Connections that a restart of the server has ended are replaced before they are used.
    return sa.create_engine(url, connect_args=given, pool_pre_ping=True, **options)


@contextlib.contextmanager
def transaction(of: sa.Engine) -> Iterator[sa.Connection]:
    """Give a connection in a transaction that is stored at the end of the block, or raises.

    If the answer to the commit is lost with the connection, the server is asked whether the transaction was stored, as
    soon as it can be reached: whoever repeats what failed does not store it twice.
    """
    lost: exc.DBAPIError | None = None
    with of.connect() as connection, connection.begin() as begun:
        id = connection.execute(_TRANSACTION).scalar_one()
        yield connection
        try:
            begun.commit()
        except exc.DBAPIError as error:
            if not error.connection_invalidated:
                raise
            lost = error
    if lost is not None and not _was_stored(of, id):  # once the pool has the connection back
        raise lost


def snapshot(connection: sa.Connection) -> str:
    """Return which transactions have ended: it stays the same as long as nothing is stored on the server."""
    return str(connection.execute(_SNAPSHOT).scalar_one())


def _was_stored(by: sa.Engine, id: str) -> bool:
    lost_at, has_warned = time.monotonic(), False
    while True:
        try:
            with by.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
                status = connection.execute(_STATUS, {"id": id}).scalar()
                if status != "in progress":
                    return bool(status == "committed")
                if time.monotonic() - lost_at > _HANGING_TIMEOUT_S:  # its locks would be in the way
                    connection.execute(_END, {"id": id})
        except exc.DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == _UNKNOWN_TRANSACTION:
                return False
            if not is_away_for_now(error):
                raise
            if not has_warned:
                has_warned = True
                logger.warning(
                    "The connection to the tracking database was lost while something was stored. Whether it was is "
                    "known when the server can be reached again: %s",
                    one_line(error),
                )
        time.sleep(_RETRY_S)


def require_usable(connection: sa.Connection, shown: str) -> None:
    """Raise `DatabaseException` if a new database cannot hold the record."""
    version = connection.dialect.server_version_info
    if version is not None and int(version[0]) < MIN_VERSION:
        raise errors.DatabaseException(
            f"the tracking database {shown!r} is on PostgreSQL {version[0]}; use {MIN_VERSION} or newer."
        )
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if encoding != "UTF8":
        raise errors.DatabaseException(
            f"the tracking database {shown!r} has the encoding {encoding}, which cannot hold all text; create one by "
            "`createdb --encoding=UTF8 --template=template0 NAME`, and name it in DET_DATABASE."
        )


def is_out_of_range(error: Exception) -> bool:
    """Return whether a number was too large for its column."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) == _OUT_OF_RANGE


def one_line(error: Exception) -> str:
    """Return the message of an error of the server or its driver."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


_REMEDIES = {
    "password": "correct user and password in DET_DATABASE, or write the password into ~/.pgpass",
    "pg_hba": "let the server accept this user and host (pg_hba.conf), or correct DET_DATABASE",
    "role": "create the role by `createuser NAME`, or correct the user in DET_DATABASE",
    "does not exist": "create the database by `createdb NAME`, or correct the name in DET_DATABASE",
    "permission denied": "let the role create tables: GRANT CREATE, USAGE ON SCHEMA public TO role, or make it the "
    "owner of the database",
    "read-only": "name the primary server in DET_DATABASE, not a standby",
    "too many": "raise max_connections of the server, which also has a connection or two for each trial",
    "No space left": "free some space on the server",
}


def remedy(cause: str) -> str:
    """Return what to do about an error of the server or its driver."""
    default = "start the server, or correct host and port in DET_DATABASE"
    return next((what for sign, what in _REMEDIES.items() if sign in cause), default)
