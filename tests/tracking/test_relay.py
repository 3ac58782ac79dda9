"""Writing to a database through another process, which may lose its memory or its answers."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from typing import Any

import pytest

from determined import errors
from determined.tracking import MetricReport, ProgressChanged, RelayedWriter, RelayedWrites, TrackingReader
from managed import record_trial

CONFIG = {"searcher": {"name": "single", "metric": "loss", "smaller_is_better": True}}


class Relay:
    """Answers like the process beside the database; it may lose an answer, and what it remembers."""

    def __init__(self, folder: pathlib.Path, database: pathlib.Path) -> None:
        self.address = folder / "relay"
        self._database = database
        self._writes = RelayedWrites(database)
        self.loses_answer = self.forgets_after_loss = False
        self._listener = Listener(str(self.address), "AF_UNIX")
        threading.Thread(target=self._accept, daemon=True).start()

    def forget(self) -> None:
        self._writes = RelayedWrites(self._database)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    request = connection.recv()
                except EOFError:
                    return
                answer = self._answer(request)
                if self.loses_answer:
                    self.loses_answer = False
                    if self.forgets_after_loss:
                        self.forget()
                    return
                connection.send(answer)

    def _answer(self, request: Any) -> Any:
        try:
            return self._writes.answer(*request)
        except errors.DeterminedException as error:
            return error


@pytest.fixture
def database(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "tracking.db"
    record_trial(path, CONFIG, {})
    return path


@pytest.fixture
def relay(tmp_path: pathlib.Path, database: pathlib.Path) -> Iterator[Relay]:
    made = Relay(tmp_path, database)
    yield made
    made.close()


@pytest.fixture
def writer(relay: Relay) -> Iterator[RelayedWriter]:
    made = RelayedWriter(relay.address, 1, 1)
    yield made
    made.close()


def report(step: int, group: str = "validation") -> MetricReport:
    return MetricReport(group=group, steps_completed=step, metrics={"loss": 1.0 / step}, time=1000.0 + step)


def steps(database: pathlib.Path) -> list[int]:
    return [one.steps_completed for one in TrackingReader(database).metrics(1, "validation")]


def test_messages_arrive_and_the_best_validation_comes_back(database: pathlib.Path, writer: RelayedWriter) -> None:
    writer.write([report(1), ProgressChanged(progress=0.5), report(2)])
    writer.write([report(3)])
    assert steps(database) == [1, 2, 3]
    assert writer.best_validation("loss", smaller_is_better=True) == pytest.approx(1 / 3)
    assert writer.checkpoints() == []


@pytest.mark.parametrize("forgets", [False, True])
def test_what_comes_twice_is_stored_once(
    database: pathlib.Path, relay: Relay, writer: RelayedWriter, forgets: bool
) -> None:
    writer.write([report(1)])
    relay.loses_answer = True
    if forgets:
        relay.forgets_after_loss = True
    writer.write([report(2), report(3), ProgressChanged(progress=0.3)])
    writer.write([report(4)])
    assert steps(database) == [1, 2, 3, 4]


def test_a_writer_goes_on_after_the_other_side_has_forgotten_it(
    database: pathlib.Path, relay: Relay, writer: RelayedWriter
) -> None:
    for step in range(1, 6):
        writer.write([report(step)])
        relay.forget()
    assert steps(database) == [1, 2, 3, 4, 5]


def test_what_the_database_refuses_is_raised_in_the_trial(relay: Relay) -> None:
    with pytest.raises(errors.NotOnRecordException, match="no trial 7"):
        RelayedWriter(relay.address, 1, 7)
