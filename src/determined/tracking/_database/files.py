"""A database file that is deleted, moved or replaced while it is in use.

A connection to it goes on to work: what it writes is where nobody will look for it, and what is there can still be
read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Self

import sqlalchemy as sa

from determined import errors

from .connections import errors_naming, file_of, for_reading


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
        with errors_naming(self._engine.url), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with errors_naming(self._engine.url), for_reading(self._engine).begin() as connection:
            yield connection
