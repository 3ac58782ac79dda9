"""Using a tracking database, which is held open or opened for each use.

A connection to a file that was deleted, moved or replaced goes on to work: what it writes is where nobody will look for
it, and what is there can still be read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Hashable, Iterator
from typing import NoReturn, Self

import sqlalchemy as sa
from sqlalchemy import pool

from determined import errors
from determined._home import home

from . import schema
from .connections import (
    data_version,
    errors_naming,
    file_of,
    for_reading,
    location,
    reading_engine,
    shown,
    transaction,
    writing_engine,
)
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
            with transaction(engine) as connection:
                yield connection
            engine.dispose()

    def marker(self) -> Hashable:
        """Return what differs from all before it if anything was stored meanwhile.

        SQLite writes to its log, or from there to the database; PostgreSQL numbers its transactions.
        """
        path = file_of(self._url)
        if path is not None:
            return tuple(map(_state_of, (path, path.with_name(f"{path.name}-wal"))))
        with errors_naming(self._url):
            return data_version(self._engine)

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


class OpenFile:
    """The file of a database that has just been opened; a server has none, which never moves."""

    def __init__(self, url: sa.URL) -> None:
        self._path = file_of(url)
        self._identity = self._current()

    @property
    def has_moved(self) -> bool:
        """Whether the path now leads to another file, or to none."""
        return self._current() != self._identity

    def require_in_place(self) -> None:
        """Raise `DatabaseException` if what is stored would not be at the path."""
        if self.has_moved:
            raise errors.DatabaseException(
                f"the tracking database {str(self._path)!r} was deleted, moved or replaced while it was in use; put it "
                "back. Checkpoints are not affected."
            )

    def _current(self) -> tuple[int, int] | None:
        try:
            found = None if self._path is None else os.stat(self._path)
        except OSError:
            return None
        return None if found is None else (found.st_dev, found.st_ino)


class OpenDatabase:
    """A database that is open for reading and writing, each use in a transaction of its own. Any thread may use it."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._file = OpenFile(engine.url)

    def close(self) -> None:
        """Close the connections to the database; what was claimed or taken stays so. Twice is fine."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        self._file.require_in_place()
        with errors_naming(self._engine.url), transaction(self._engine) as connection:
            yield connection

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with errors_naming(self._engine.url), for_reading(self._engine).begin() as connection:
            yield connection


def _state_of(path: pathlib.Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
