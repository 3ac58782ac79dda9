"""The contexts of `core.init()` one by one, for a process that trains alone: to try code out without a run.

They do the same work, but record nothing: what would be recorded is checked and logged.
"""

from __future__ import annotations

import logging
import os

from determined import storage, tracking
from determined._home import home
from determined.core._checkpoint import CheckpointContext
from determined.core._outbox import Outbox
from determined.core._preempt import PreemptContext, PreemptMode
from determined.core._profiler import ProfilerContext
from determined.core._recorder import RunFacts, RunRecorder
from determined.core._searcher import SearcherContext
from determined.core._train import ScalarLog, TrainContext
from determined.core.distributed import DistributedContext

logger = logging.getLogger("determined.core")


class DummyDistributedContext(DistributedContext):
    """The context of a process that trains alone, as rank 0 of 1."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)


class DummyTrainContext(TrainContext):
    """Logs reports; `get_tensorboard_path` returns a folder that belongs to no trial."""

    def __init__(self) -> None:
        recorder, outbox = _LoggingRecorder(), Outbox()
        outbox.close()  # a disabled log puts nothing into it
        super().__init__(recorder, ScalarLog(outbox, recorder, enabled=False), None)


class DummyCheckpointContext(CheckpointContext):
    """Saves and reads checkpoints, in the folder `storage_manager` or that of the home folder."""

    def __init__(
        self, dist: DistributedContext | None = None, storage_manager: str | os.PathLike[str] | None = None
    ) -> None:
        store = storage.store_for(storage_manager, home().checkpoints)
        super().__init__(dist or DummyDistributedContext(), store, _LoggingRecorder())


class DummyPreemptContext(PreemptContext):
    """Never asks to stop, unless `start()` made it listen to signals."""

    def __init__(
        self, dist: DistributedContext | None = None, preempt_mode: PreemptMode = PreemptMode.WorkersAskChief
    ) -> None:
        super().__init__(dist or DummyDistributedContext(), preempt_mode)


class DummySearcherContext(SearcherContext):
    """Yields one operation of the given length."""

    def __init__(self, dist: DistributedContext | None = None, length: int = 1) -> None:
        config = {"searcher": {"max_length": length}}
        super().__init__(dist or DummyDistributedContext(), config, lambda done: logger.info("progress: %g", done))


class DummyProfilerContext(ProfilerContext):
    """Samples system metrics and logs them."""

    def __init__(self) -> None:
        super().__init__(lambda group, metrics: logger.info("%s: %s", group, dict(metrics)))


class _LoggingRecorder(RunRecorder):
    def __init__(self) -> None:
        super().__init__(RunFacts(name="core", config=None, hparams={}, seed=0), None, None)

    def put(self, message: tracking.Message) -> None:
        logger.info("%s", message)
