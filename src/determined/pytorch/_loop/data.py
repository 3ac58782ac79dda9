"""Builds the data of a trial for the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data.batch import data_length
from determined.pytorch._data.loader import DataLoader
from determined.pytorch._data.split import Sizing
from determined.pytorch._data.stream import Stream, length_of, stream_of, validation_loader
from determined.pytorch._data.workers import prepare_workers
from determined.pytorch._optim.precision import ManualScaling
from determined.pytorch._trial import PyTorchTrial, overrides


def build_data(trial: PyTorchTrial, context: PyTorchTrialContext) -> tuple[Stream, Any]:
    """Return the training data and the validation data of a trial. All ranks must call this."""
    training = _checked_loader(trial.build_training_data_loader(), "build_training_data_loader", context)
    begins_at = context.reported_initial_batch
    validation = _checked_loader(trial.build_validation_data_loader(), "build_validation_data_loader", context)
    if any(getattr(loader, "num_workers", 0) for loader in (training, validation)):
        # Workers must not be forked while the recorder thread imports: they would inherit a held lock.
        context.services.recorder.wait()
    stream = stream_of(training, context.distributed, context.trial_seed, begins_at, _sizing(context))
    if isinstance(validation, DataLoader):
        # The chief alone evaluates a whole data set.
        together = overrides(trial, "evaluate_batch")
        validation = validation_loader(validation, context.distributed if together else None, context.trial_seed)
    if length_of(validation) == 0 and context.distributed.size == 1:
        raise RuntimeError(
            "The validation data loader has no batches; check its data set, and batch_size with drop_last."
        )
    return stream, validation


def _sizing(context: PyTorchTrialContext) -> Sizing:
    slots = ((context.config_if_any or {}).get("resources") or {}).get("slots_per_trial")
    planned_ranks = None
    if isinstance(slots, Mapping) and context.services.info is not None and not context.divides_batches:
        planned_ranks = slots["max"]  # so that the size of batches does not depend on the slots that were free
    # A program that updates a scaler itself does so in each call of `train_batch`, and may only after a step.
    return Sizing(planned_ranks, accumulates=not isinstance(context.precision, ManualScaling))


def _checked_loader(loader: Any, method: str, context: PyTorchTrialContext) -> Any:
    if isinstance(loader, DataLoader) or not context.experimental.dataset_checks:
        return prepare_workers(loader)
    raise RuntimeError(
        f"{method}() returned a {type(loader).__module__}.{type(loader).__name__}; return a "
        "determined.pytorch.DataLoader, which takes the same arguments and continues exactly after a resume. To use "
        "another loader anyway, call context.experimental.disable_dataset_reproducibility_checks() in the "
        "trial's __init__."
    )


def length_of_batch(trial: PyTorchTrial) -> Callable[[Any], int | None]:
    """Return the function that counts samples; it returns None for batches that need an override of the trial."""
    if overrides(trial, "get_batch_length"):
        return trial.get_batch_length

    def count(batch: Any) -> int | None:
        try:
            return data_length(batch)
        except (TypeError, ValueError):
            return None

    return count
