"""The class that users subclass: models, data, and how to train and evaluate a batch."""

from __future__ import annotations

import abc
from typing import Any

from torch import Tensor

from determined import errors
from determined.pytorch._callback import PyTorchCallback
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data.batch import TorchData, data_length
from determined.pytorch._data.loader import DataLoader
from determined.pytorch._metrics.reducers import Reducer


class PyTorchTrial(abc.ABC):
    """A training program. Subclass it, wrap models and optimizers in `__init__`, and train a batch in `train_batch`.

    Override exactly one of `evaluate_batch` and `evaluate_full_dataset`. The constructor of a subclass may take more
    arguments.
    """

    @abc.abstractmethod
    def __init__(self, context: PyTorchTrialContext) -> None:
        """Create models, optimizers and schedulers, and wrap them with `context`."""

    @abc.abstractmethod
    def build_training_data_loader(self) -> DataLoader:
        """Return the loader of training data."""

    @abc.abstractmethod
    def build_validation_data_loader(self) -> DataLoader:
        """Return the loader of validation data."""

    @abc.abstractmethod
    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> Tensor | dict[str, Any]:
        """Train on one batch and return the loss, or a dict of metrics.

        Call `context.backward(loss)` and `context.step_optimizer(optimizer)`. Both indices count from the start
        of training, also after a resume.
        """

    def evaluate_batch(self, batch: TorchData, batch_idx: int) -> dict[str, Any]:
        """Return the metrics of one validation batch. `evaluation_reducer` returns how they are combined.

        Gradients are off and models are in evaluation mode.
        """
        raise errors.InternalException("evaluate_batch() is called only where a trial overrides it.")

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """Return the metrics of the whole validation data. Runs on the chief only.

        Batches are as the loader yields them: move them with `context.to_device`.
        """
        raise errors.InternalException("evaluate_full_dataset() is called only where a trial overrides it.")

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """Return how the metrics of validation batches are combined: one reducer for all, or a dict by metric name."""
        return Reducer.AVG

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Return callbacks by name. After a resume, each gets the state that was saved under its name."""
        return {}

    def get_batch_length(self, batch: Any) -> int:
        """Return the number of samples in a batch. Override it for batches of other types."""
        return data_length(batch)


def overrides(trial: PyTorchTrial, method: str) -> bool:
    """Return whether a trial overrides a method."""
    own = getattr(trial, method)
    return getattr(own, "__func__", own) is not getattr(PyTorchTrial, method)


def check_evaluation(trial: PyTorchTrial) -> None:
    """Raise for a trial that overrides both evaluate methods, or neither."""
    batch, full = overrides(trial, "evaluate_batch"), overrides(trial, "evaluate_full_dataset")
    if batch == full:
        raise errors.InvalidExperimentException(
            f"{type(trial).__name__} overrides {'both' if batch else 'neither'} of evaluate_batch and "
            "evaluate_full_dataset; override exactly one, preferably evaluate_batch."
        )
