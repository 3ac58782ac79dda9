"""The contexts of `core.init()` one by one, for a process that trains alone: to try code out without a run.

They do the same work, but leave nothing in the record: what would be recorded is checked and logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from determined import storage
from determined._home import home
from determined.core._checkpoint import CheckpointContext
from determined.core._distributed import DistributedContext
from determined.core._outbox import Outbox
from determined.core._preempt import PreemptContext, PreemptMode
from determined.core._profiler import ProfilerContext
from determined.core._recorder import RunFacts
from determined.core._scalars import ScalarLog
from determined.core._searcher import SearcherContext
from determined.core._train import TrainContext
from determined.core._worker_recording import WorkerRecording

if TYPE_CHECKING:
    from determined.tracking import Message

logger = logging.getLogger("determined.core")


class DummyDistributedContext(DistributedContext):
    """The context of a process that trains alone, as rank 0 of 1."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)


class DummyTrainContext(TrainContext):
    """Logs reports; `get_tensorboard_path` gives a folder of no trial."""

    def __init__(self) -> None:
        recording, outbox = _LoggedRecording(), Outbox()
        outbox.close()  # a log that is off puts nothing into it
        super().__init__(recording, ScalarLog(outbox, recording, enabled=False), None, lambda _: None)


class DummyCheckpointContext(CheckpointContext):
    """Saves and reads checkpoints, in the folder `storage_manager` or else that of the home folder."""

    def __init__(
        self, dist: DistributedContext | None = None, storage_manager: str | os.PathLike[str] | None = None
    ) -> None:
        store = storage.store_for(storage_manager, home().checkpoints)
        super().__init__(dist or DummyDistributedContext(), store, _LoggedRecording(), lambda: None)


class DummyPreemptContext(PreemptContext):
    """Never asks to stop, unless `start()` made it listen to signals."""

    def __init__(
        self, dist: DistributedContext | None = None, preempt_mode: PreemptMode = PreemptMode.WorkersAskChief
    ) -> None:
        super().__init__(dist or DummyDistributedContext(), preempt_mode)


class DummySearcherContext(SearcherContext):
    """Gives one operation of a length."""

    def __init__(self, dist: DistributedContext | None = None, length: int = 1) -> None:
        config = {"searcher": {"max_length": length}}
        super().__init__(dist or DummyDistributedContext(), config, lambda done: logger.info("progress: %g", done))


class DummyProfilerContext(ProfilerContext):
    """Samples system metrics and logs them."""

    def __init__(self) -> None:
        super().__init__(_log_metrics)


class _LoggedRecording(WorkerRecording):
    """A record that is the log."""

    def __init__(self) -> None:
        super().__init__(home(), RunFacts(name="core", config=None, hparams={}, seed=0), None)

    def put(self, message: Message) -> None:
        logger.info("%s", message)


def _log_metrics(group: str, metrics: Mapping[str, Any]) -> None:
    logger.info("%s: %s", group, dict(metrics))
