"""TensorBoard files beside the checkpoints, where those are in an object store."""

from __future__ import annotations

import hashlib
import logging
import pathlib
import threading

from determined import storage
from determined.core._recorder import RunRecorder

logger = logging.getLogger("determined.core")

PERIOD_S = 60.0


def prefix_of(database: pathlib.Path | str, experiment_id: int, trial_id: int | None = None) -> str:
    """Return the folder in a store for the files of an experiment, or of one of its trials.

    Databases that share a store have folders of their own.
    """
    key = hashlib.sha256(str(database).encode()).hexdigest()[:12]
    of_experiment = f"tensorboard/{key}/experiment-{experiment_id}"
    return of_experiment if trial_id is None else f"{of_experiment}/trial-{trial_id}"


class TensorboardUploads:
    """Uploads the TensorBoard files that this machine writes for a trial: every minute, if they change, and at the end.

    Does nothing for a store in a folder.
    """

    def __init__(self, store: storage.CheckpointStore, recorder: RunRecorder) -> None:
        self._store = store
        self._recorder = recorder
        self._known: dict[str, tuple[int, int]] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def start(self) -> None:
        """Begin to upload."""
        if isinstance(self._store, storage.FsspecStore):
            self._thread = threading.Thread(target=self._work, name="resolute-tensorboard", daemon=True)
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
        assert isinstance(self._store, storage.FsspecStore)
        try:
            folder = self._recorder.tensorboard_path
            prefix = prefix_of(self._recorder.database, self._recorder.experiment_id, self._recorder.trial_id)
            self._store.put_tree(folder, prefix, self._known)
        except Exception as error:  # each client library raises its own types
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "TensorBoard files cannot be uploaded to %s now: %s The run continues.",
                    self._store.location,
                    self._store.explain(error),
                )
