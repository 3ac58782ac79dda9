"""Telling a database that has no room or cannot be reached now from one that cannot be used at all."""

from __future__ import annotations

import errno

from determined import errors

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
# Of PostgreSQL: connection lost, transaction rolled back to let others go on, no resources, lock not available, server
# that shuts down or starts up, standby that becomes the primary.
_PASSING_STATES = ("08", "40", "53", "55P03", "57P", "25006", "25P03")


def lacks_room(error: errors.TrackingException | OSError) -> bool:
    """Return whether the disk is full or read-only, so that a later attempt may succeed."""
    cause = error if isinstance(error, OSError) else getattr(error.__cause__, "orig", None) or error.__cause__
    code = getattr(cause, "sqlite_errorcode", None)
    if code is None:
        return isinstance(cause, OSError) and cause.errno in _NO_ROOM
    import sqlite3

    # The last one is for side files that cannot be made.
    codes = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
    return code & 0xFF in codes


def is_away(error: errors.TrackingException) -> bool:
    """Return whether the server of the database cannot be reached or refuses now, so that a later attempt may succeed.

    A wrong password counts too: whoever was connected before cannot have mistyped it.
    """
    return is_away_for_now(error.__cause__)


def is_away_for_now(cause: BaseException | None) -> bool:
    """Return what `is_away` does for an error of the database library."""
    if getattr(cause, "connection_invalidated", False):
        return True
    error = getattr(cause, "orig", None)
    if not hasattr(error, "sqlstate"):  # not of PostgreSQL's driver
        return False
    import psycopg

    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:  # nobody was there to give one
        return True
    return isinstance(error, psycopg.Error) and str(error.sqlstate).startswith(_PASSING_STATES)
