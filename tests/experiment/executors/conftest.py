"""Executors for tests."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from executor_runs import Runs, environment

from determined.experiment.executors import LocalExecutor


@pytest.fixture(scope="session")
def shared_executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    """One for all tests of trial classes, as its forkserver takes seconds to import torch."""
    with LocalExecutor(environment(tmp_path_factory.mktemp("home"))) as executor:
        yield executor


@pytest.fixture
def executor(tmp_path: pathlib.Path) -> Iterator[LocalExecutor]:
    """One of its own for a test that harms it."""
    home = tmp_path / "home"
    home.mkdir()
    with LocalExecutor(environment(home)) as executor:
        yield executor


@pytest.fixture
def runs(tmp_path: pathlib.Path, shared_executor: LocalExecutor) -> Iterator[Runs]:
    """Runs of a program; none of their processes may outlive the test."""
    yield from _checked(Runs(tmp_path, shared_executor))


@pytest.fixture
def own_runs(tmp_path: pathlib.Path, executor: LocalExecutor) -> Iterator[Runs]:
    """Runs with an executor of their own."""
    yield from _checked(Runs(tmp_path, executor))


def _checked(runs: Runs) -> Iterator[Runs]:
    yield runs
    runs.kill_all()
