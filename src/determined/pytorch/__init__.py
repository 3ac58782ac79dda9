"""Train PyTorch models: subclass `PyTorchTrial`, then `Trainer(trial, context).fit(...)`."""

from determined.pytorch import samplers
from determined.pytorch._callback import PyTorchCallback
from determined.pytorch._checkpoint.consolidate import consolidate_checkpoint
from determined.pytorch._checkpoint.load import CheckpointLoadContext, load_trial_from_checkpoint_path
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data.batch import TorchData, data_length, to_device
from determined.pytorch._data.loader import DataLoader
from determined.pytorch._experimental import PyTorchExperimentalContext
from determined.pytorch._loop.plan import Batch, Epoch, ShouldExit, TrainUnit
from determined.pytorch._loop.plan import TrainBoundary as _TrainBoundary
from determined.pytorch._loop.plan import TrainBoundaryType as _TrainBoundaryType
from determined.pytorch._loop.progress import Progress as _TrialState
from determined.pytorch._metrics.reducers import FunctionReducer as _SimpleReducer
from determined.pytorch._metrics.reducers import MetricReducer, Reducer
from determined.pytorch._optim.lr_scheduler import LRScheduler
from determined.pytorch._trainer import Trainer, init
from determined.pytorch._trainer import configured_unit as configured_unit
from determined.pytorch._trial import PyTorchTrial
from determined.pytorch.samplers import adapt_batch_sampler

# Programs written for Determined name these.
_ShouldExit = ShouldExit

__all__ = [
    "Batch",
    "CheckpointLoadContext",
    "DataLoader",
    "Epoch",
    "LRScheduler",
    "MetricReducer",
    "PyTorchCallback",
    "PyTorchExperimentalContext",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "Reducer",
    "ShouldExit",
    "TorchData",
    "TrainUnit",
    "Trainer",
    "_ShouldExit",
    "_SimpleReducer",
    "_TrainBoundary",
    "_TrainBoundaryType",
    "_TrialState",
    "adapt_batch_sampler",
    "consolidate_checkpoint",
    "data_length",
    "init",
    "load_trial_from_checkpoint_path",
    "samplers",
    "to_device",
]
