"""PostgreSQL servers for tests, on sockets of their own: one that all tests of a session share, and others to restart.

Neither outlives the tests, however those end.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

import pytest

_FOLDERS = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
_OPTIONS = (
    "-c", "fsync=off", "-c", "listen_addresses=", "-c", "max_connections=150", "-c", "shared_buffers=16MB",
)  # fmt: skip
# Ends the server, and removes its folder, when nobody holds the lock any more that all who use it share.
_GUARD = 'lock=$1 folder=$2; shift 2; "$@" & flock -x "$lock"; kill -INT $!; wait $!; rm -rf "$folder"'
_numbers = itertools.count(1)


def program(name: str) -> str:
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, _FOLDERS)])
    found = shutil.which(name, path=path)
    reason = f"PostgreSQL's {name} is not installed (Debian's package postgresql has it)"
    return str(pathlib.Path(found).resolve()) if found else pytest.skip(reason)


def _user() -> str | None:
    """Who runs the server, which refuses root; None for whoever runs the tests."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")


def _initialized() -> pathlib.Path:
    """Make the folder of a new server. Not under pytest's folders, which only their owner can enter."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'resolute[postgres]')")
    initdb, user = program("initdb"), _user()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="pg-"))
    if user is not None:
        shutil.chown(folder, user)
    made = [initdb, "-D", f"{folder}/data", "-U", "tests", "-A", "trust", "-N", "--no-locale", "-E", "UTF8"]
    subprocess.run(made, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)
    return folder


def _command(folder: pathlib.Path) -> list[str]:
    return [program("postgres"), "-D", f"{folder}/data", "-k", str(folder), *_OPTIONS]


def _url(folder: pathlib.Path, database: str = "postgres") -> str:
    return f"postgresql://tests@/{database}?host={folder}"


class Server:
    """A server that can be stopped and started."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.url = _url(folder)
        self.start()

    def start(self) -> None:
        bound = [setpriv, "--pdeathsig", "INT"] if (setpriv := shutil.which("setpriv")) else []
        command, user = [*bound, *_command(self.folder)], _user()
        self._process = subprocess.Popen(command, user=user, cwd=self.folder, stderr=subprocess.DEVNULL)
        _wait_for(self.folder, self._process)

    def stop(self, *, at_once: bool = False) -> None:
        """Stop it; `at_once` as in a crash, after which it repairs itself when it starts."""
        self._process.send_signal(signal.SIGQUIT if at_once else signal.SIGINT)
        self._process.wait(60)


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """Give a server of one's own; skip where there is no PostgreSQL or no driver for it."""
    folder = _initialized()
    try:
        made = Server(folder)
        try:
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def shared(common: pathlib.Path) -> Iterator[str]:
    """Give the URL of a server that all who name the same folder share; it ends with the last of them."""
    users, known = common / "postgresql.users", common / "postgresql.url"
    with open(users, "ab") as use, open(common / "postgresql.setup", "ab") as setup:
        fcntl.flock(use, fcntl.LOCK_SH)
        fcntl.flock(setup, fcntl.LOCK_EX)
        if not known.exists():
            folder = _initialized()
            with open(users, "ab") as lock:
                guard = ["/bin/sh", "-c", _GUARD, "guard", str(lock.fileno()), str(folder), *_command(folder)]
                process = subprocess.Popen(
                    guard, user=_user(), cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, pass_fds=[lock.fileno()],
                    start_new_session=True,
                )  # fmt: skip
            process.returncode = 0  # nobody waits for it: it ends later than this process
            _wait_for(folder, None)
            known.write_text(_url(folder))
        fcntl.flock(setup, fcntl.LOCK_UN)
        yield known.read_text()


@contextlib.contextmanager
def database(url: str) -> Iterator[str]:
    """Give the URL of a new database on a server."""
    import psycopg

    name = f"test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        try:
            yield url.replace("/postgres?", f"/{name}?")
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _wait_for(folder: pathlib.Path, process: subprocess.Popen[bytes] | None) -> None:
    """Wait until a server says that it is ready."""
    status = folder / "data" / "postmaster.pid"
    deadline = time.monotonic() + 60
    while not (status.exists() and status.read_text().rstrip().endswith("ready")):
        assert process is None or process.poll() is None, "PostgreSQL has ended"
        assert time.monotonic() < deadline, "PostgreSQL does not become ready"
        time.sleep(0.02)
