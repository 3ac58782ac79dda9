"""Opening the tracking database: where it is, how SQLite is set up, how its errors read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import random
import sqlite3
import time
import urllib.parse
import zlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc, pool

from determined import errors
from determined._database_location import shown as without_password
from determined._home import make_private

from . import postgresql
from .schema import Damage

BUSY_TIMEOUT_S = 30.0  # seconds that a connection waits for another one's write
_RETRY_DELAYS_S = 0.0005, 0.003  # seconds
_random = random.SystemRandom()  # training's random numbers are not ours to draw
ELSEWHERE = "set DET_HOME to another folder"
_LOCATIONS = "set DET_DATABASE to the path of an SQLite file or to a URL such as postgresql://user@host/name"
SALVAGE = (
    "Restore a backup of that file, or move it away and a new one is created, or salvage what it holds with "
    "`sqlite3 FILE .recover`; checkpoints are not affected."
)
MAX_LOG_SIZE = 4 << 20  # bytes that the write-ahead log keeps once nobody needs more of it


def location(url_or_path: str | pathlib.Path) -> sa.URL:
    """Return the URL of a database that is given as a URL or as the path of an SQLite file."""
    if isinstance(url_or_path, str) and "://" in url_or_path:
        url = _with_driver(_parsed(url_or_path))
    else:
        url = sa.URL.create("sqlite", database=os.fspath(pathlib.Path(url_or_path).absolute()))
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise errors.DatabaseException(
            f"the tracking database {shown(url)!r} lives in memory, where no other process can read it; "
            "pass the path of a file."
        )
    return url


def _parsed(text: str) -> sa.URL:
    try:
        return sa.make_url(text)
    except (exc.ArgumentError, ValueError):
        raise errors.DatabaseException(
            f"{without_password(text)!r} is not the location of a database; {_LOCATIONS}."
        ) from None


def _with_driver(url: sa.URL) -> sa.URL:
    """Return the URL with the driver that is used for its kind of server; `DatabaseException` if there is none."""
    if url.drivername in ("postgresql", "postgres", postgresql.DRIVER):
        return url.set(drivername=postgresql.DRIVER)
    if url.get_backend_name() == "sqlite":
        return url
    raise errors.DatabaseException(
        f"{shown(url)!r} is a database of a kind that cannot keep the record ({url.drivername}); {_LOCATIONS}."
    )


def shown(url: sa.URL) -> str:
    """Return the path of an SQLite file, or the URL without its password."""
    if url.get_backend_name() == "sqlite" and url.database:
        return url.database
    return without_password(url.set(drivername=url.get_backend_name()).render_as_string(hide_password=False))


def file_of(url: sa.URL) -> pathlib.Path | None:
    """Return the SQLite file, or None for a database server."""
    return pathlib.Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def create_file(path: pathlib.Path) -> None:
    """Make an empty database file that only its owner can read, unless there is one."""
    try:
        make_private(path.parent)
        _remove_orphans(path)
        # Before SQLite does: it would follow the umask, and its side files copy this file's mode. One that is there is
        # not opened: to close it again would take away the locks that this process has on it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    except OSError as error:
        raise errors.DatabaseException(
            f"the tracking database {str(path)!r} cannot be created: {error}; make the folder writable or {ELSEWHERE}."
        ) from error


def _remove_orphans(path: pathlib.Path) -> None:
    """Remove the side files of a database that is gone: SQLite would take them for those of the new one."""
    orphans = [path.with_name(f"{path.name}-{kind}") for kind in ("wal", "shm")]
    if path.exists() or not any(orphan.exists() for orphan in orphans):
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # one at a time, so that nobody removes those of a new one
        if not path.exists():
            for orphan in orphans:
                orphan.unlink(missing_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    finally:
        os.close(folder)


def writing_engine(url: sa.URL, *, has_one_connection: bool = False) -> sa.Engine:
    """Return an engine whose transactions hold the write lock from their start; on one connection or on several."""
    options = {"pool_size": 1, "max_overflow": 0} if has_one_connection else {}
    path = file_of(url)
    if path is None:
        return _server_engine(url, **options)
    engine = sa.create_engine(url, creator=lambda: _connect(path, "rw"), poolclass=pool.QueuePool, **options)
    event.listen(engine, "connect", _prepare_for_writing)
    event.listen(engine, "begin", _begin)
    return engine


def reading_engine(url: sa.URL) -> sa.Engine:
    """Return an engine that cannot change the database and keeps no connection open."""
    path = file_of(url)
    if path is None:
        return for_reading(_server_engine(url, poolclass=pool.NullPool))
    engine = sa.create_engine(url, creator=lambda: _connect(path, "ro"), poolclass=pool.NullPool)
    event.listen(engine, "connect", _prepare_for_reading)
    event.listen(engine, "begin", _begin)
    return for_reading(engine)


def for_reading(engine: sa.Engine) -> sa.Engine:
    """Return the engine with transactions that leave writers alone; connections are shared."""
    if file_of(engine.url) is None:
        # What one transaction reads must be of one point in time, as with SQLite.
        return engine.execution_options(isolation_level="REPEATABLE READ")
    return engine.execution_options(reading=True)


def data_version(engine: sa.Engine) -> Hashable:
    """Return what differs from before if anything was stored meanwhile.

    With SQLite, what the engine's only connection has stored does not count.
    """
    if file_of(engine.url) is None:
        with for_reading(engine).connect() as reading:
            return postgresql.snapshot(reading)
    with _outside_transactions(engine) as connection:
        ((version,),) = connection.execute("PRAGMA data_version").fetchall()
        return id(connection), version


def empty_log(engine: sa.Engine) -> None:
    """Let an SQLite file hold by itself what is stored, as far as others who use it permit."""
    with _outside_transactions(engine) as connection:
        connection.execute("PRAGMA wal_checkpoint").fetchall()


def vacuum_into(url: sa.URL, target: pathlib.Path) -> None:
    """Copy an SQLite database into an empty file, as it is at one point in time."""
    with _outside_transactions(reading_engine(url)) as connection:
        connection.execute("VACUUM INTO ?", [os.fspath(target)])


@contextlib.contextmanager
def _outside_transactions(engine: sa.Engine) -> Iterator[Any]:
    """Give SQLite's own connection: a transaction that stays open would keep the log from being emptied."""
    connection = engine.raw_connection()
    try:
        yield connection.driver_connection
    finally:
        connection.close()


@contextlib.contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Give a connection in a transaction that is stored, all of it, at the end of the block."""
    begun = engine.begin() if file_of(engine.url) is not None else postgresql.transaction(engine)
    with begun as connection:
        yield connection


def wait_for_turn(connection: sa.Connection, purpose: str, number: int) -> None:
    """Let those who do one thing do it one after the other, each until the end of its transaction."""
    if connection.dialect.name == "postgresql":  # in SQLite there is one writer at a time anyway
        key = zlib.crc32(purpose.encode()) - 2**31
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key, number)))


def _server_engine(url: sa.URL, **options: Any) -> sa.Engine:
    try:
        return postgresql.engine(url, **options)
    except ImportError as error:
        raise errors.DatabaseException(
            f"the driver for the tracking database {shown(url)!r} cannot be loaded: {' '.join(str(error).split())}; "
            "run: pip install 'resolute[postgres]'"
        ) from error


def _connect(path: pathlib.Path, mode: str) -> sqlite3.Connection:
    # Percent-encoded, because a file name may hold "?" or "#", which mean something in a URI.
    return sqlite3.connect(
        f"file:{urllib.parse.quote(os.fspath(path))}?mode={mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,  # transactions begin where `_begin` says, not where the driver guesses
        check_same_thread=False,  # the pool hands a connection to one thread at a time
    )


def _prepare_for_reading(connection: sqlite3.Connection, _record: Any) -> None:
    connection.execute("PRAGMA cell_size_check = ON")


def _prepare_for_writing(connection: sqlite3.Connection, _record: Any) -> None:
    connection.execute("PRAGMA foreign_keys = ON")
    _use_write_ahead_log(connection)
    connection.execute("PRAGMA synchronous = FULL")
    # Else a log that grew while somebody read for long would keep its size.
    connection.execute(f"PRAGMA journal_size_limit = {MAX_LOG_SIZE}")


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    def switch() -> None:
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            # On a file system without shared memory it stays as it is: slower, and as safe.
            connection.execute("PRAGMA journal_mode = WAL").fetchone()

    # SQLite does not wait at all when two processes change the mode at once.
    _when_free(switch)


def _begin(connection: sa.Connection) -> None:
    driver: Any = connection.connection.driver_connection
    if connection.get_execution_options().get("reading", False):
        driver.execute("BEGIN")
        return
    # SQLite itself asks ever more seldom when it waits, and others would always be faster.
    driver.execute("PRAGMA busy_timeout = 0")
    try:
        _when_free(lambda: driver.execute("BEGIN IMMEDIATE"))
    finally:
        driver.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")


def _when_free(action: Callable[[], object]) -> None:
    """Do what needs the database for itself, as soon as others let go of it."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(_random.uniform(*_RETRY_DELAYS_S))


@contextlib.contextmanager
def errors_naming(url: sa.URL) -> Iterator[None]:
    """Turn damage, and what the database libraries raise inside, into an exception that names the database."""
    try:
        yield
    except Damage as damage:
        raise errors.DatabaseException(
            f"the tracking database {shown(url)!r} is damaged: {damage}; {_salvage(url)}."
        ) from damage
    except OverflowError as error:
        raise errors.InvalidRequestException(
            f"the tracking database {shown(url)!r} has no such number: {error}; no id or count is that large: give a "
            "smaller number."
        ) from error
    except (exc.SQLAlchemyError, sqlite3.Error, UnicodeDecodeError) as error:
        cause = postgresql.one_line(error)
        if postgresql.is_out_of_range(error):
            raise errors.InvalidRequestException(
                f"the tracking database {shown(url)!r} has no such number: {cause}; give a smaller number."
            ) from error
        raise errors.DatabaseException(
            f"the tracking database {shown(url)!r} cannot be used: {cause}; {_remedy(url, cause)}."
        ) from error


def _remedy(url: sa.URL, cause: str) -> str:
    if file_of(url) is None:
        return postgresql.remedy(cause)
    if "not a database" in cause:
        return f"move that file away, or {ELSEWHERE}"
    if "malformed" in cause or "decode" in cause:
        return _salvage(url)
    if "full" in cause:
        return f"free some space there, or {ELSEWHERE}"
    if "locked" in cause:
        return "another process holds it for too long: end that one"
    return f"check that it is there and that you may read and write it, or {ELSEWHERE}"


def _salvage(url: sa.URL) -> str:
    if file_of(url) is None:
        return "restore a backup of it; checkpoints are not affected"
    return f"`det doctor` checks it. {SALVAGE.removesuffix('.')}"
