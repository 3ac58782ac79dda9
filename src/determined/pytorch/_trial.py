"""What a user writes: models, data, and what to do with a batch."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from determined import errors
from determined.pytorch._callback import PyTorchCallback
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data.batch import TorchData, data_length
from determined.pytorch._data.loader import DataLoader
from determined.pytorch._metrics.reducers import Reducer


class PyTorchTrial(abc.ABC):
    """A training program: subclass it, wrap models and optimizers in `__init__`, and say how to train a batch.

    Override exactly one of `evaluate_batch` and `evaluate_full_dataset`. A subclass may take more arguments in
    its constructor.
    """

    @abc.abstractmethod
    def __init__(self, context: PyTorchTrialContext) -> None:
        """Make models, optimizers and schedulers and wrap them with `context`."""

    @abc.abstractmethod
    def build_training_data_loader(self) -> DataLoader:
        """Return the loader of training data."""

    @abc.abstractmethod
    def build_validation_data_loader(self) -> DataLoader:
        """Return the loader of validation data."""

    @abc.abstractmethod
    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> Tensor | dict[str, Any]:
        """Train on one batch and return the loss, or a dict of metrics.

        Run `context.backward(loss)` and `context.step_optimizer(optimizer)`. Both indices count from the start
        of training, also after a resume.
        """

    def evaluate_batch(self, batch: TorchData, batch_idx: int) -> dict[str, Any]:
        """Return the metrics of one validation batch; `evaluation_reducer` says how they are combined.

        Gradients are off and models in evaluation mode.
        """
        raise errors.InternalException("evaluate_batch() is called only where a trial overrides it.")

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """Return the metrics of the whole validation data; runs on the chief only.

        Batches come as the loader gives them: move them with `context.to_device`.
        """
        raise errors.InternalException("evaluate_full_dataset() is called only where a trial overrides it.")

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """Return how the metrics of validation batches are combined: one way for all, or one for each name."""
        return Reducer.AVG

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Return callbacks by name; under its name each finds its state again after a resume."""
        return {}

    def get_batch_length(self, batch: Any) -> int:
        """Return the number of samples in a batch; override it for batches of your own types."""
        return data_length(batch)


def overrides(trial: PyTorchTrial, method: str) -> bool:
    """Say whether a trial brings its own version of a method."""
    own = getattr(trial, method)
    return getattr(own, "__func__", own) is not getattr(PyTorchTrial, method)


def check_evaluation(trial: PyTorchTrial) -> None:
    """Refuse a trial that overrides both evaluate methods, or neither."""
    batch, full = overrides(trial, "evaluate_batch"), overrides(trial, "evaluate_full_dataset")
    if batch == full:
        raise errors.InvalidExperimentException(
            f"{type(trial).__name__} overrides {'both' if batch else 'neither'} of evaluate_batch and "
            "evaluate_full_dataset; override exactly one, preferably evaluate_batch."
        )


def evaluate_batch_of(trial: PyTorchTrial) -> Callable[[Any, int], Any]:
    """Return a trial's `evaluate_batch`, called with a batch index also in its old form without one."""
    method = trial.evaluate_batch
    parameters = inspect.signature(method).parameters.values()
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if takes_any or len(positional) >= 2:
        return method
    return lambda batch, _: method(batch)  # type: ignore[call-arg]  # the old form
