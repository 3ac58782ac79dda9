"""A tracking database that is opened for each use: to read all of one point in time, or to write all or nothing."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import time
from collections.abc import Hashable, Iterator
from typing import NoReturn

import sqlalchemy as sa
from sqlalchemy import pool

from determined import errors
from determined._home import home

from . import schema
from .connections import errors_naming, file_of, location, reading_engine, shown, writing_engine
from .migrations import VERSION, migrate, opened, version_of


class Access:
    """Opens a database, by default that of the home folder, and holds no connection between uses."""

    def __init__(self, url_or_path: str | pathlib.Path | None) -> None:
        self._url = location(url_or_path or home().database)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Give a connection that sees one point in time; it finds nothing where there is no database."""
        path = file_of(self._url)
        if path is None or path.exists():
            with errors_naming(self._url), self._engine.connect() as connection:
                if self._bring_up_to_date(connection):
                    with connection.begin():
                        yield connection
                    return
        with _empty_database() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self, *, creating: bool = False) -> Iterator[sa.Connection]:
        """Give a connection in a transaction; `creating` makes an SQLite file that is not there."""
        with opened(self._url, creating=creating) as engine:
            with engine.begin() as connection:
                yield connection
            engine.dispose()

    def marker(self) -> Hashable:
        """Return what differs from all before it if anything was stored meanwhile.

        SQLite writes to its log, or from there to the database. Nothing tells of PostgreSQL, where it always differs.
        """
        path = file_of(self._url)
        return (
            time.monotonic_ns() if path is None else tuple(map(_state_of, (path, path.with_name(f"{path.name}-wal"))))
        )

    def missing(self, what: str, command: str) -> NoReturn:
        """Raise that something is not in the database, with the command that shows what is."""
        raise errors.NotOnRecordException(
            f"there is no {what} in {shown(self._url)!r}; `{command}` shows what there is."
        )

    @functools.cached_property
    def _engine(self) -> sa.Engine:
        return reading_engine(self._url)

    def _bring_up_to_date(self, connection: sa.Connection) -> bool:
        """Return whether there are tables, which are not there while a run is just creating them."""
        with connection.begin():
            version = version_of(connection)
        if 0 < version < VERSION:
            engine = writing_engine(self._url)
            try:
                migrate(engine)
            finally:
                engine.dispose()
        return version > 0


@contextlib.contextmanager
def _empty_database() -> Iterator[sa.Connection]:
    with sa.create_engine("sqlite://", poolclass=pool.NullPool).begin() as connection:
        schema.metadata.create_all(connection, checkfirst=False)
        yield connection


def _state_of(path: pathlib.Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
