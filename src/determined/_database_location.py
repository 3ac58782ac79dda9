"""Where the tracking database is: the path of an SQLite file, or the URL of a server, whose password nobody sees."""

from __future__ import annotations

import pathlib
import re
import urllib.parse
from typing import TypeAlias

DatabaseLocation: TypeAlias = str | pathlib.Path
"""A path, or a URL that may hold a password: show it by `shown` only."""

_SQLITE_URL = re.compile(r"sqlite(?:\+\w+)?:///(?P<path>[^?]+)")
# More than a password is hidden where one holds a character that should have been percent-encoded.
_PASSWORD = re.compile(r"(?<=://)([^:/?@]*):.*@")
_PASSWORD_PARAMETER = re.compile(r"(?i)([?&]\w*password=)[^&]*")


def located(given: str) -> DatabaseLocation:
    """Return the location that a user has written: a path or a URL. Relative paths start at the working folder."""
    found = _SQLITE_URL.fullmatch(given)
    if "://" in given and found is None:
        return given
    path = urllib.parse.unquote(found["path"]) if found else given
    return pathlib.Path(path).expanduser().absolute()


def shown(location: object) -> str:
    """Return a location, or text with one in it, without the password."""
    return _PASSWORD_PARAMETER.sub(r"\1***", _PASSWORD.sub(r"\1:***@", str(location)))


def name_of(location: DatabaseLocation) -> str:
    """Return what names a database in files that others may get, whoever connects to it: no user, no password."""
    if isinstance(location, pathlib.Path):
        return str(location)
    scheme, _, rest = location.partition("://")
    url = urllib.parse.urlsplit(f"//{rest.rpartition('@')[2]}")
    host = url.netloc or dict(urllib.parse.parse_qsl(url.query)).get("host", "")
    return f"{scheme.partition('+')[0]}://{host}{url.path}"
