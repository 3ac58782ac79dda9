from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import driving
import psutil
import pytest

from determined import tracking


@pytest.fixture
def database(tmp_path: pathlib.Path) -> str | pathlib.Path:
    return os.environ.get("DET_DATABASE") or tmp_path / "home" / "tracking.db"


@pytest.fixture
def describe_run() -> Callable[..., tracking.RunDescription]:
    """A description of this process as a run, with fields replaced by keyword."""

    def describe(**changes: Any) -> tracking.RunDescription:
        fields: dict[str, Any] = {
            "name": "digits",
            "config": None,
            "hparams": {"lr": 0.1},
            "seed": 7,
            "entrypoint": "train.py",
            "torch_version": "2.6.0",
            "resolute_version": "0.1.0",
            "git_commit": "abc123",
            "pid": os.getpid(),
            "process_started": psutil.Process().create_time(),
            "host": socket.gethostname(),
        }
        return tracking.RunDescription(**(fields | changes))

    return describe


@pytest.fixture
def writer(database: pathlib.Path, describe_run: Callable[..., Any]) -> Iterator[tracking.TrialWriter]:
    with tracking.TrialWriter.start(database, describe_run()) as writer:
        yield writer


@pytest.fixture
def reader(database: pathlib.Path) -> tracking.TrackingReader:
    return tracking.TrackingReader(database)


@pytest.fixture
def store(database: pathlib.Path) -> Iterator[tracking.ExperimentStore]:
    """The store of a new experiment that this process runs."""
    with driving.claimed(database) as store:
        yield store


@pytest.fixture
def living() -> Iterator[tracking.RunProcess]:
    """Another process of this machine, which lives."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            yield tracking.RunProcess.of(process.pid)
        finally:
            process.communicate(b"\n", timeout=60)
