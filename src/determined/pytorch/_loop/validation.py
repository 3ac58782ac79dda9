"""Validate: compute metrics over all of the validation data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from determined import errors
from determined.core.metrics import BatchColumns
from determined.pytorch._callback import Callbacks, as_numpy, with_index
from determined.pytorch._checkpoint.saver import Saver
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data import rng
from determined.pytorch._data.loader import batches_of
from determined.pytorch._loop.plan import Stopped
from determined.pytorch._loop.stop import Stops
from determined.pytorch._metrics.reducers import Reducer, reduced
from determined.pytorch._metrics.window import MetricWindow, plain_data, present_values
from determined.pytorch._report.display import Display
from determined.pytorch._trial import PyTorchTrial, overrides


@dataclasses.dataclass(slots=True)
class Validation:
    """Runs validations over one loader. All ranks must run theirs at the same time."""

    trial: PyTorchTrial
    context: PyTorchTrialContext
    callbacks: Callbacks
    loader: Any
    max_batches: int | None
    stops: Stops
    display: Display
    saver: Saver
    batches_seen: int = 0
    """Counts all batches of all validations."""
    _evaluates: bool = False
    _by_batch: bool = dataclasses.field(init=False)
    _starts_workers: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._starts_workers = any(self.context.distributed.allgather(bool(getattr(self.loader, "num_workers", 0))))
        self._by_batch = overrides(self.trial, "evaluate_batch")
        if self._by_batch:
            check_reducers(self.trial.evaluation_reducer())

    def run(self) -> dict[str, Any]:
        """Return the metrics of a validation.

        Models stay in evaluation mode and gradients off until `resume_training`, for the hooks after the validation. If
        the validation fails, both are reset at once. If asked to stop, it raises `Stopped` after a batch and restores
        random numbers and reducers, so that a resumed run can repeat it.
        """
        self.display.validating()
        if self._starts_workers:  # workers must not be forked while the writer thread is writing
            self.saver.wait()
        before = rng.get_state()
        try:
            return self._run()
        except BaseException as error:
            self.resume_training()
            if isinstance(error, Stopped):
                rng.set_state(before)
                self.context.reset_reducers()
            raise

    def resume_training(self) -> None:
        """Put the models back into training mode, with gradients, after a validation."""
        if self._evaluates:
            self._set_training(True)

    def _set_training(self, is_training: bool) -> None:
        self._evaluates = not is_training
        for model in self.context.models:
            model.train() if is_training else model.eval()
        torch.set_grad_enabled(is_training)

    def _run(self) -> dict[str, Any]:
        self._set_training(False)
        self.context.reset_reducers()
        self.callbacks.run("on_validation_start")
        self.context.backend.broadcast_buffers(self.context.models)
        metrics = self._evaluate_batches() if self._by_batch else self._evaluate_all()
        return metrics | self.context.reduce_metrics(for_training=False)

    def _evaluate_all(self) -> dict[str, Any]:
        # If a forward pass needs all ranks, all of them evaluate the same data.
        evaluates = self.context.distributed.is_chief or self.context.backend.forward_is_collective
        metrics = self._evaluate_full_dataset() if evaluates else {}
        return self.context.distributed.broadcast(metrics)

    def _evaluate_full_dataset(self) -> dict[str, Any]:
        metrics = self.trial.evaluate_full_dataset(self.loader)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"evaluate_full_dataset() returned {metrics!r}; return a dict of metrics.")
        window = MetricWindow()
        window.add(metrics)
        (batch,) = plain_data(window.take())
        return {
            name: value if isinstance(value, Real) else reduced([value], Reducer.AVG) for name, value in batch.items()
        }

    def _evaluate_batches(self) -> dict[str, Any]:
        self.callbacks.run("on_validation_epoch_start")
        own = self._outputs(itertools.islice(batches_of(self.loader), self.max_batches))
        if own is not None and self.callbacks.wants("on_validation_epoch_end"):
            self.callbacks.run("on_validation_epoch_end", [as_numpy(outputs) for outputs in own])
        gathered = self.context.distributed.allgather(None if own is None else plain_data(own))
        per_rank = [columns for columns in gathered if columns is not None]
        if len(per_rank) < len(gathered):  # a rank was asked to stop
            raise Stopped
        outputs = per_rank[0] if len(per_rank) == 1 else BatchColumns.interleaved(per_rank)
        if not outputs:
            raise RuntimeError(
                "The validation data loader has no batches; check the data set, and batch_size with drop_last."
            )
        _check_names(per_rank)
        return combined(outputs, self.trial.evaluation_reducer())

    def _outputs(self, batches: Iterable[Any]) -> BatchColumns | None:
        """Return the metrics of this rank's batches; None if it was asked to stop."""
        evaluate, move = with_index(self.trial.evaluate_batch, 2), self.context.batch_mover()
        window = MetricWindow()
        eval_batches = self.context.backend.eval_batches(batches, self.stops.wanted)
        for index, batch in enumerate(eval_batches):
            metrics = evaluate(move(batch), index)
            if type(metrics) is not dict and not isinstance(metrics, Mapping):
                raise TypeError(
                    f"evaluate_batch() returned {metrics!r}; return a dict of metrics, such as "
                    '{"validation_loss": loss}.'
                )
            if index == 0:
                names = frozenset(metrics)
            elif metrics.keys() != names:
                raise ValueError(
                    f"evaluate_batch() returned the metrics {sorted(metrics)} for batch {index}, but {sorted(names)} "
                    "for the first; return the same names for every batch."
                )
            window.add(metrics)
            self.batches_seen += 1
        return None if eval_batches.stopped else window.take()


def _check_names(per_rank: Sequence[BatchColumns]) -> None:
    names = [sorted(columns.columns) for columns in per_rank if len(columns)]
    for other in names[1:]:
        if other != names[0]:
            raise ValueError(
                f"evaluate_batch() returned the metrics {other} on one rank, but {names[0]} on another; return the "
                "same names for every batch."
            )


def combined(outputs: BatchColumns, reducers: Reducer | Mapping[str, Reducer]) -> dict[str, Any]:
    """Return each metric reduced over all batches to one number, or the list of its values if it has none."""
    by_name = _reducer_by_name(reducers, list(outputs.columns))
    return {name: reduced(values, by_name[name]) for name, values in present_values(outputs).items()}


def _reducer_by_name(reducers: Any, names: list[str]) -> Mapping[str, Reducer]:
    check_reducers(reducers)
    if not isinstance(reducers, Mapping):
        return dict.fromkeys(names, reducers)
    if set(reducers) != set(names):
        raise errors.InvalidExperimentException(
            f"evaluation_reducer() has reducers for {sorted(reducers)}, but evaluate_batch() returns "
            f"{sorted(names)}; give each metric a reducer, and no other."
        )
    return reducers


def check_reducers(reducers: Any) -> None:
    """Raise unless `evaluation_reducer` returned a `Reducer` or a dict of them."""
    by_name = reducers if isinstance(reducers, Mapping) else {"every metric": reducers}
    for name, reducer in by_name.items():
        if not isinstance(reducer, Reducer):
            raise errors.InvalidExperimentException(
                f"evaluation_reducer() gives {reducer!r} for {name!r}; return a member of pytorch.Reducer, such as "
                "Reducer.AVG. For a function, use context.wrap_reducer()."
            )
