"""Telling a database that has no room now from one that cannot be used at all."""

from __future__ import annotations

import errno

from determined import errors

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


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
