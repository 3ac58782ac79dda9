"""Launches: in this process where that will do, since importing torch takes longest."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator

import pytest

import forking

MODULE = "determined.launch.torch_distributed"


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A working folder, and an environment in which ranks find what tests import; both as before afterwards."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("PYTHONPATH", forking.PYTHONPATH)
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
def start(project: pathlib.Path) -> Iterator[Callable[..., forking.Process]]:
    """Starts launchers as processes of their own, and ends them after the test."""
    started: list[forking.Process] = []

    def start(*words: str, **variables: str) -> forking.Process:
        started.append(
            forking.start(
                ["-m", MODULE, *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                stdin=forking.DEVNULL,
                stdout=forking.PIPE,
                stderr=forking.STDOUT,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        with process:
            process.kill()  # after which its ranks end by themselves
            process.communicate(timeout=60)
