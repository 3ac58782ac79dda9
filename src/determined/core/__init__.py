"""The services of a training process, usable without the training loop.

`__all__` lists what programs use. Other packages of determined also use `RunFacts`, `parse_length` and the modules
`checkpoint_gc` and `metrics`.
"""

from determined.core._checkpoint import CheckpointContext, DownloadMode
from determined.core._context import Context, TensorboardMode, init
from determined.core._dummies import (
    DummyCheckpointContext,
    DummyDistributedContext,
    DummyPreemptContext,
    DummyProfilerContext,
    DummySearcherContext,
    DummyTrainContext,
)
from determined.core._preempt import PreemptContext, PreemptMode
from determined.core._profiler import ProfilerContext
from determined.core._recorder import RunFacts as RunFacts
from determined.core._searcher import SearcherContext, SearcherMode, SearcherOperation, Unit
from determined.core._searcher import parse_length as parse_length
from determined.core._train import EarlyExitReason, TrainContext
from determined.core.distributed import DistributedContext

__all__ = [
    "CheckpointContext",
    "Context",
    "DistributedContext",
    "DownloadMode",
    "DummyCheckpointContext",
    "DummyDistributedContext",
    "DummyPreemptContext",
    "DummyProfilerContext",
    "DummySearcherContext",
    "DummyTrainContext",
    "EarlyExitReason",
    "PreemptContext",
    "PreemptMode",
    "ProfilerContext",
    "SearcherContext",
    "SearcherMode",
    "SearcherOperation",
    "TensorboardMode",
    "TrainContext",
    "Unit",
    "init",
]
