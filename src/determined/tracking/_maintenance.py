"""Checking the tracking database, and making a copy of it while others use it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
from collections.abc import Iterator

import sqlalchemy as sa

from determined import errors
from determined._home import home

from ._data.records import Problem
from ._database import schema as db
from ._database.access import Access
from ._database.connections import SALVAGE, errors_naming, file_of, location, shown, vacuum_into
from ._leases import is_living
from ._queries import process_of

_MAX_FINDINGS = 10  # of one kind of damage: thousands of rows can be wrong at once


def check_database(url_or_path: str | pathlib.Path | None = None) -> list[Problem]:
    """Return what is wrong with a database, by default that of the home folder; changes nothing but an older schema.

    Looks for damage to the file, rows that belong to nothing, and claims and slots of processes that are gone.
    """
    access = Access(url_or_path)
    try:
        with access.reading() as connection:
            return [*_damage(connection), *_stale_claims(connection), *_stale_leases(connection)]
    except errors.DatabaseException as error:
        return [Problem(what=str(error), remedy="Follow what that message says.")]


def _damage(connection: sa.Connection) -> Iterator[Problem]:
    if connection.dialect.name != "sqlite":  # a server checks itself
        return
    for (found,) in connection.exec_driver_sql(f"PRAGMA integrity_check({_MAX_FINDINGS})"):
        if found != "ok":
            yield Problem(what=f"The database is damaged: {found}.", remedy=SALVAGE)
    for row in connection.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(_MAX_FINDINGS):
        what = f"Row {row[1]} of table {row[0]} belongs to a row of table {row[2]} that is not there."
        yield Problem(what=what, remedy=SALVAGE)


def _stale_claims(connection: sa.Connection) -> Iterator[Problem]:
    query = sa.select(db.runners, db.experiments.c.state).join(db.experiments).order_by(db.runners.c.id)
    for row in connection.execute(query):
        process = process_of(row)
        if process is not None and process.is_gone and not row.state.is_final:
            yield Problem(
                what=f"Experiment {row.id} is {row.state.value}, but its runner (process {process.pid} on "
                f"{process.host}) is gone.",
                remedy=f"`det experiment activate {row.id}` resumes it, `det experiment kill {row.id}` ends it.",
            )


def _stale_leases(connection: sa.Connection) -> Iterator[Problem]:
    of_host = db.leases.c.host == socket.gethostname()
    for row in connection.execute(sa.select(db.leases).where(of_host).order_by(db.leases.c.slot)):
        process = process_of(row)
        if process is not None and not is_living(process):
            yield Problem(
                what=f"Slot {row.slot} is held for trial {row.trial_id} by process {process.pid}, which is gone.",
                remedy="Nothing needs to be done: the next trial that needs a slot frees it.",
            )


def back_up(target: str | pathlib.Path, url_or_path: str | pathlib.Path | None = None) -> None:
    """Copy an SQLite database, by default that of the home folder, into a new file that only its owner can read.

    The copy is consistent and complete though others write meanwhile. `ConflictException` if the file exists.
    """
    url, path = location(url_or_path or home().database), pathlib.Path(target).absolute()
    source = file_of(url)
    if source is None:
        raise errors.InvalidRequestException(
            f"the tracking database {shown(url)!r} is on a server; back it up with the server's own tools, such as "
            "pg_dump."
        )
    if not source.exists():
        raise errors.NotOnRecordException(f"there is no tracking database at {str(source)!r} to back up.")
    with _new_file(path) as unfinished, errors_naming(url):
        vacuum_into(url, unfinished)


@contextlib.contextmanager
def _new_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Give an empty file to fill, which gets its name when it is complete."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _require_absent(path)
        file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            yield unfinished
            os.fsync(file)
            _require_absent(path)
            unfinished.rename(path)
        finally:
            os.close(file)
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise errors.InvalidRequestException(
            f"the backup {str(path)!r} cannot be written: {error}; name a file in a folder that you may write to."
        ) from error


def _require_absent(path: pathlib.Path) -> None:
    if os.path.lexists(path):
        raise errors.ConflictException(f"{str(path)!r} exists already; name a new file for the backup.")
