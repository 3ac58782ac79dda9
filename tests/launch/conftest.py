"""Launches: in this process where that will do, since importing torch takes longest."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import determined

TESTS = pathlib.Path(__file__).parents[1]
SOURCES = pathlib.Path(determined.__file__).parents[1]
MODULE = "determined.launch.torch_distributed"


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A working folder, and an environment in which ranks find what tests import; both as before afterwards."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCES), str(TESTS)]))
    before = dict(os.environ)
    yield folder
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def script(project: pathlib.Path) -> Callable[[str], str]:
    """Writes a program into the working folder."""

    def write(text: str, name: str = "train.py") -> str:
        (project / name).write_text(text, encoding="utf-8")
        return name

    return write


@pytest.fixture
def start(project: pathlib.Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts launchers as processes of their own, and ends them after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **variables: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", MODULE, *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                preexec_fn=_heed_interrupts,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()  # after which its ranks end by themselves
        process.communicate(timeout=60)


def _heed_interrupts() -> None:
    # A shell that started the tests in the background has told them to ignore these.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
