"""A PostgreSQL server for tests, on a socket of its own."""

from __future__ import annotations

import contextlib
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
_SERVER = (
    "-c", "fsync=off", "-c", "listen_addresses=", "-c", "max_connections=40", "-c", "shared_buffers=16MB",
)  # fmt: skip


def program(name: str) -> str:
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, _FOLDERS)])
    found = shutil.which(name, path=path)
    return str(pathlib.Path(found).resolve()) if found else pytest.skip(f"PostgreSQL's {name} is not installed")


def _user() -> str | None:
    """Who runs the server, which refuses root; None for whoever runs the tests."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Give the URL of a new database; skip where there is no PostgreSQL or no driver for it."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'resolute[postgres]')")
    initdb, postgres, user = program("initdb"), program("postgres"), _user()
    # Not under pytest's folders, which only their owner can enter.
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        if user is not None:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        made = [initdb, "-D", data, "-U", "tests", "-A", "trust", "-N", "--no-locale", "-E", "UTF8"]
        subprocess.run(made, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)
        # A server does not outlive tests that are killed.
        bound = [setpriv, "--pdeathsig", "INT"] if (setpriv := shutil.which("setpriv")) else []
        command = [*bound, postgres, "-D", data, "-k", folder, *_SERVER]
        with subprocess.Popen(command, user=user, cwd=folder, stderr=subprocess.DEVNULL) as process:
            try:
                _wait_for(pathlib.Path(folder, "data", "postmaster.pid"), process)
                yield f"postgresql+psycopg://tests@/postgres?host={folder}"
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)


def _wait_for(status: pathlib.Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server says that it is ready."""
    deadline = time.monotonic() + 60
    while not (status.exists() and status.read_text().rstrip().endswith("ready")):
        assert process.poll() is None, "PostgreSQL has ended"
        assert time.monotonic() < deadline, "PostgreSQL does not become ready"
        time.sleep(0.02)
