"""Writing to a database that this process cannot open, through a process that passes messages on.

`RelayedWriter` is the side of the trial and needs no SQLAlchemy. `RelayedWrites` is the side of the database.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
import time
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from determined import errors

from ._data.messages import Message, MetricReport

if TYPE_CHECKING:
    from ._data.records import CheckpointRecord
    from ._writer import TrialWriter

RELAY_VARIABLE = "DET_TRACKING_RELAY"
"""Tells a trial the socket of the process that passes on what it reports."""
_RETRY_TIMEOUT_S = 30.0
_RETRY_S = 0.2


class RelayedRun(NamedTuple):
    """The run that a writer is for."""

    experiment_id: int
    trial_id: int
    run_id: int | None
    writer: str
    """Differs for every writer."""


def relay() -> pathlib.Path | None:
    """Return the socket by which this process reaches the database; None if it opens the database itself."""
    address = os.environ.get(RELAY_VARIABLE)
    return pathlib.Path(address) if address else None


class RelayedWriter:
    """Does what `TrialWriter` does. A call returns when its messages are in the database."""

    def __init__(self, address: pathlib.Path, experiment_id: int, trial_id: int, run_id: int | None = None) -> None:
        self.experiment_id = experiment_id
        self.trial_id = trial_id
        self._address = address
        self._run = RelayedRun(experiment_id, trial_id, run_id, uuid.uuid4().hex)
        self._connection: Connection | None = None
        self._written = 0
        self._lock = threading.Lock()
        self._ask("attach")

    def write(self, messages: Sequence[Message]) -> None:
        """Store all messages in one transaction, or none of them if it fails."""
        if messages:
            self._ask("write", self._written, list(messages))
            self._written += len(messages)

    def follow_database(self) -> bool:
        """Return False: the record of an experiment is not moved."""
        return False

    def best_validation(self, metric: str, smaller_is_better: bool) -> float | None:
        """Return what `TrialWriter.best_validation` returns."""
        best: float | None = self._ask("best_validation", metric, smaller_is_better)
        return best

    def checkpoints(self) -> list[CheckpointRecord]:
        """Return the checkpoints of the trial."""
        found: list[CheckpointRecord] = self._ask("checkpoints")
        return found

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _ask(self, method: str, *arguments: Any) -> Any:
        deadline = time.monotonic() + _RETRY_TIMEOUT_S
        with self._lock:
            while True:
                try:
                    if self._connection is None:
                        self._connection = Client(str(self._address), "AF_UNIX")
                    self._connection.send((self._run, method, *arguments))
                    answer = self._connection.recv()
                    break
                except (OSError, EOFError) as error:  # the other process was restarted
                    if self._connection is not None:
                        self._connection.close()
                        self._connection = None
                    if time.monotonic() > deadline:
                        raise errors.DatabaseException(
                            f"the tracking database cannot be reached through {self._address}: {error!r}."
                        ) from error
                    time.sleep(_RETRY_S)
        if isinstance(answer, errors.DeterminedException):
            raise answer
        return answer


class RelayedWrites:
    """Performs the requests of relayed writers. What comes twice, since its answer was lost, is stored once."""

    def __init__(self, database: str | pathlib.Path) -> None:
        self._database = database
        self._writers: dict[int, tuple[int | None, TrialWriter]] = {}
        self._written: dict[str, int] = {}
        """How many messages of each writer have been stored."""

    def answer(self, run: RelayedRun, method: str, *arguments: Any) -> Any:
        """Return what follows from a request."""
        from ._reader import TrackingReader

        if method == "checkpoints":
            return TrackingReader(self._database).checkpoints(trial_id=run.trial_id)
        writer = self._writer(run)
        if method == "write":
            self._write(run.writer, writer, *arguments)
        elif method == "best_validation":
            return writer.best_validation(*arguments)
        return None

    def _writer(self, run: RelayedRun) -> TrialWriter:
        from ._writer import TrialWriter

        run_id, writer = self._writers.get(run.trial_id, (None, None))
        if writer is None or run_id != run.run_id:
            new = TrialWriter.attach(self._database, run.experiment_id, run.trial_id, run.run_id)
            if writer is not None:
                with contextlib.suppress(errors.TrackingException):
                    writer.close()
            self._writers[run.trial_id] = run.run_id, new
            return new
        return writer

    def _write(self, name: str, writer: TrialWriter, before: int, messages: Sequence[Message]) -> None:
        if name not in self._written:  # after a restart, some of these may be on record
            reports = [i for i, one in enumerate(messages) if isinstance(one, MetricReport) and writer.has_report(one)]
            self._written[name] = before + max(reports, default=-1) + 1
        writer.write(messages[max(0, self._written[name] - before) :])
        self._written[name] = before + len(messages)
