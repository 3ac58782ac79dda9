"""The record of runs on other nodes than the database: trial, agent of its node, actor beside the database."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from multiprocessing.connection import Connection, Listener
from typing import Any

from determined import errors
from determined.experiment.executors.ray._ray import NAMESPACE

RETRY_TIMEOUT_S = 60.0


class Relay:
    """Passes what the trials of this node report on to the actor beside the database. A trial waits for the answer."""

    def __init__(self, address: pathlib.Path, actor: str) -> None:
        self.address = address
        self._actor = actor
        address.unlink(missing_ok=True)
        self._listener = Listener(str(address), "AF_UNIX")
        threading.Thread(target=self._accept, name="accepts trials", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError):
                return
            threading.Thread(target=self._serve, args=(connection,), name="passes records on", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            while True:
                connection.send(self._answer(connection.recv()))

    def _answer(self, request: tuple[Any, ...]) -> Any:
        import ray

        try:
            actor = ray.get_actor(self._actor, namespace=NAMESPACE)
            return ray.get(actor.call.remote("answer", *request), timeout=RETRY_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            return error.cause if isinstance(error.cause, errors.DeterminedException) else _unreachable(error)
        except (ray.exceptions.RayError, ValueError) as error:
            return _unreachable(error)


def _unreachable(error: Exception) -> errors.DatabaseException:
    line = str(error).strip().rpartition("\n")[2]
    return errors.DatabaseException(f"the actor that writes to the tracking database does not answer: {line}")


class RecordsActor:
    """Writes what the relays of other nodes pass on. It runs on the node of the database."""

    def __init__(self, database: str) -> None:
        from determined.tracking import RelayedWrites

        self._writes = RelayedWrites(pathlib.Path(database))

    def answer(self, *request: Any) -> Any:
        """Return what follows from a request of a trial."""
        return self._writes.answer(*request)
