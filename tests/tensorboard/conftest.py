from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

Read = Callable[[pathlib.Path], list[Any]]


@pytest.fixture(scope="session")
def read_events() -> Read:
    """Gives TensorBoard's own reading of the only event file in a folder, without the version header."""

    def read(folder: pathlib.Path) -> list[Any]:
        (file,) = (path for path in folder.iterdir() if path.is_file())
        header, *events = map(Event.FromString, RawEventFileLoader(str(file)).Load())
        assert header.file_version == "brain.Event:2"
        return events

    return read


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("DET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
