"""Copies of a folder of this machine in an object store."""

from __future__ import annotations

import logging
import pathlib
import threading
from collections.abc import Callable

from determined.storage._fsspec.store import FsspecStore

logger = logging.getLogger("determined.storage")

PERIOD_S = 60.0


class FolderMirror:
    """Uploads the files of a folder that changes: every minute those that have changed, and the rest at the end."""

    def __init__(self, store: FsspecStore, source: Callable[[], tuple[pathlib.Path, str]], name: str) -> None:
        """`source` returns the folder and its prefix in the store; `name` is what warnings call the files."""
        self._store = store
        self._source = source
        self._name = name
        self._known: dict[str, tuple[int, int]] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def start(self) -> None:
        """Begin to upload."""
        self._thread = threading.Thread(target=self._work, name=f"uploads {self._name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Upload what has changed, and end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._upload()

    def _work(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self._upload()

    def _upload(self) -> None:
        try:
            folder, prefix = self._source()
            self._store.put_tree(folder, prefix, self._known)
        except Exception as error:  # each client library raises its own types
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s cannot be uploaded to %s now: %s The run continues.",
                    self._name,
                    self._store.location,
                    self._store.explain(error),
                )
