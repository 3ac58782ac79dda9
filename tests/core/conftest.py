from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest
from core_ranks import Ranks

from determined import tracking
from determined._home import home


@pytest.fixture
def records() -> tracking.TrackingReader:
    """What is recorded in the home folder of the test."""
    return tracking.TrackingReader(home().database)


@pytest.fixture
def only_trial(records: tracking.TrackingReader) -> Callable[[], tracking.TrialRecord]:
    """Reads the one trial that the test has recorded."""

    def read() -> tracking.TrialRecord:
        (experiment,) = records.experiments()
        (trial,) = records.trials(experiment.id)
        return trial

    return read


@pytest.fixture
def read_curves() -> Callable[[pathlib.Path], dict[str, list[tuple[int, float]]]]:
    """Reads (step, value) of every scalar in a TensorBoard folder, with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    def read(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
        curves: dict[str, list[tuple[int, float]]] = {}
        for file in folder.glob("events.out.tfevents.*"):
            for event in map(Event.FromString, RawEventFileLoader(str(file)).Load()):
                for value in event.summary.value:
                    curves.setdefault(value.tag, []).append((event.step, value.simple_value))
        return curves

    return read


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Starts processes that are ranks, and ends them with the test."""
    started = Ranks()
    yield started
    started.end()
