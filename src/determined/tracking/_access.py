"""A tracking database that is opened for each use: to read all of one moment, or to write all or nothing."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import time
from collections.abc import Hashable, Iterator
from typing import NoReturn

import sqlalchemy as sa

from determined import errors
from determined._home import home

from . import _database, _migrations
from ._reading import NoReader, Reader


class Access:
    """Opens a database, by default that of the home folder, and holds no connection between uses."""

    def __init__(self, url_or_path: str | pathlib.Path | None) -> None:
        self._url = _database.location(url_or_path or home().database)

    @contextlib.contextmanager
    def reader(self) -> Iterator[Reader]:
        """Give what reads all of one moment; it finds nothing where there is no database."""
        path = _database.file_of(self._url)
        if path is not None and not path.exists():
            yield NoReader()
            return
        with _database.errors_naming(self._url), self._engine.connect() as connection:
            with connection.begin():
                version = _migrations.check_version(connection)
            if 0 < version < len(_migrations.MIGRATIONS):
                self._migrate()
            with connection.begin():
                # There is no version while a run is just creating it.
                yield Reader(connection) if version else NoReader()

    @contextlib.contextmanager
    def writer(self, *, creating: bool = False) -> Iterator[sa.Connection]:
        """Give a connection in a transaction; `creating` makes an SQLite file that is not there."""
        with _migrations.opened(self._url, creating=creating) as engine:
            with engine.begin() as connection:
                yield connection
            engine.dispose()

    def marker(self) -> Hashable:
        """Return what differs from all before it if anything was stored meanwhile.

        SQLite writes to its log, or from there to the database. Nothing tells of PostgreSQL, where it always differs.
        """
        path = _database.file_of(self._url)
        return (
            time.monotonic_ns() if path is None else tuple(map(_state_of, (path, path.with_name(f"{path.name}-wal"))))
        )

    def missing(self, what: str, command: str) -> NoReturn:
        """Raise that something is not in the database, with the command that shows what is."""
        raise errors.NotOnRecordException(
            f"there is no {what} in {_database.shown(self._url)!r}; `{command}` shows what there is."
        )

    @functools.cached_property
    def _engine(self) -> sa.Engine:
        return _database.reading_engine(self._url)

    def _migrate(self) -> None:
        engine = _database.writing_engine(self._url)
        try:
            _migrations.migrate(engine)
        finally:
            engine.dispose()


def _state_of(path: pathlib.Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
