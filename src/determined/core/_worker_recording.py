"""What ranks other than the chief know of the record."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from determined._home import Home
from determined._info import ClusterInfo
from determined.core._recorder import UNRECORDED_ID, Recording, RunFacts

if TYPE_CHECKING:
    from determined.tracking import Message


class WorkerRecording(Recording):
    """The ids of the run. What is put is dropped: the chief records for all."""

    def __init__(self, home: Home, facts: RunFacts, info: ClusterInfo | None) -> None:
        self._home = home
        self._facts = facts
        self._info = info
        self._recorder = None
        self._unwritten = []
        self._opened = threading.Event()
        self._opened.set()
        self._shared_ids = UNRECORDED_ID, UNRECORDED_ID

    def put(self, message: Message) -> None:
        """Drop a message, which the chief writes as well."""

    def confirm(self) -> None:
        """Do nothing: nothing was kept."""

    def best_validation(self, metric: str, smaller_is_better: bool) -> float | None:
        """Return nothing: only the chief reads the database."""
        return None

    def _take_ids(self, ids: tuple[int, int]) -> None:
        self._shared_ids = ids

    def _ids(self) -> tuple[int, int]:
        return self._shared_ids
