"""One validation: metrics of the whole validation data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from determined import errors
from determined.pytorch._callback import Callbacks
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._metrics import hold, read
from determined.pytorch._reducer import REDUCTIONS, Reducer
from determined.pytorch._trial import PyTorchTrial, evaluate_batch_of, overrides


class Validation:
    """Runs validations over one loader."""

    def __init__(
        self,
        trial: PyTorchTrial,
        context: PyTorchTrialContext,
        callbacks: Callbacks,
        loader: Any,
        most_batches: int | None,
    ) -> None:
        self._trial = trial
        self._context = context
        self._callbacks = callbacks
        self._loader = loader
        self._most_batches = most_batches
        self._by_batch = overrides(trial, "evaluate_batch")

    def run(self) -> dict[str, Any]:
        """Return the metrics of a validation. Models are in evaluation mode meanwhile."""
        self._callbacks.run("on_validation_start")
        self._context.reset_reducers()
        for model in self._context.models:
            model.eval()
        with torch.no_grad():
            metrics = self._evaluate_batches() if self._by_batch else self._evaluate_all()
        metrics |= self._context.reduce_metrics(for_training=False)
        self._context.reset_reducers()
        for model in self._context.models:
            model.train()
        return metrics

    def _evaluate_all(self) -> dict[str, Any]:
        metrics = self._trial.evaluate_full_dataset(self._loader)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"evaluate_full_dataset() returned {metrics!r}; return a dict of metrics.")
        return read([{name: hold(value) for name, value in metrics.items()}])[0]

    def _evaluate_batches(self) -> dict[str, Any]:
        self._callbacks.run("on_validation_epoch_start")
        outputs = self._outputs(itertools.islice(self._loader, self._most_batches))
        if not outputs:
            raise RuntimeError(
                "The validation data loader has no batches; check the data set, and batch_size with drop_last."
            )
        outputs = read(outputs)
        self._callbacks.run("on_validation_epoch_end", outputs)
        return combined(outputs, self._trial.evaluation_reducer())

    def _outputs(self, batches: Iterable[Any]) -> list[dict[str, Any]]:
        evaluate, move = evaluate_batch_of(self._trial), mover(self._context)
        outputs: list[dict[str, Any]] = []
        for index, batch in enumerate(batches):
            metrics = evaluate(move(batch), index)
            if not outputs:
                _check_output(metrics)
                names = metrics.keys()
            elif metrics.keys() != names:
                raise ValueError(
                    f"evaluate_batch() returned the metrics {sorted(metrics)} for batch {index}, but {sorted(names)} "
                    "for the first; return the same names for every batch."
                )
            outputs.append({name: hold(value) for name, value in metrics.items()})
        return outputs


def mover(context: PyTorchTrialContext) -> Callable[[Any], Any]:
    """Return what takes a batch to where the trial wants it."""
    return context.to_device if context.experimental.auto_to_device else _as_is


def _as_is(batch: Any) -> Any:
    return batch


def _check_output(metrics: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f'evaluate_batch() returned {metrics!r}; return a dict of metrics, such as {{"validation_loss": loss}}.'
        )


def combined(outputs: Sequence[Mapping[str, Any]], reducers: Reducer | Mapping[str, Reducer]) -> dict[str, Any]:
    """Return one value for each metric from those of all batches."""
    names = list(outputs[0])
    by_name = _reducer_by_name(reducers, names)
    return {name: _combine(name, [batch[name] for batch in outputs], by_name[name]) for name in names}


def _reducer_by_name(reducers: Any, names: list[str]) -> Mapping[str, Reducer]:
    if isinstance(reducers, Mapping):
        if set(reducers) != set(names):
            raise errors.InvalidExperimentException(
                f"evaluation_reducer() has reducers for {sorted(reducers)}, but evaluate_batch() returns "
                f"{sorted(names)}; give each metric a reducer, and no other."
            )
        by_name = dict(reducers)
    else:
        by_name = dict.fromkeys(names, reducers)
    for name, reducer in by_name.items():
        if not isinstance(reducer, Reducer):
            raise errors.InvalidExperimentException(
                f"evaluation_reducer() gives {reducer!r} for {name!r}; pass a member of pytorch.Reducer, such as "
                "Reducer.AVG. For a function, use context.wrap_reducer()."
            )
    return by_name


def _combine(name: str, values: list[Any], reducer: Reducer) -> Any:
    try:
        if len({np.shape(value) for value in values}) > 1:
            raise ValueError("its shape changes between batches")
        return REDUCTIONS[reducer](values)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The validation metric {name!r} cannot be combined by {reducer} ({error}); return numbers or arrays of "
            "one shape, or use context.wrap_reducer()."
        ) from error
