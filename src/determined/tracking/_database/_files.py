"""A database file that is deleted, moved or replaced while it is in use.

A connection to it goes on to work: what it writes is where nobody will look for it, and what is there can still be
read.
"""

from __future__ import annotations

import os

import sqlalchemy as sa

from determined import errors

from . import _engine


class OpenFile:
    """The file of a database that has just been opened; a server has none, which never moves."""

    def __init__(self, url: sa.URL) -> None:
        self._path = _engine.file_of(url)
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
