"""Metrics over many batches and ranks, by named reducers or the user's own."""

from __future__ import annotations

import abc
import dataclasses
import enum
import itertools
import logging
import math
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from determined.core import DistributedContext
from determined.core.metrics import are_floats, as_array, as_float, mean_of
from determined.errors import MisuseError
from determined.pytorch._data.tree import map_plain

logger = logging.getLogger("determined.pytorch")


_PLAIN_TYPES = frozenset({bool, int, float, complex, str, bytes, types.NoneType})


class Reducer(enum.Enum):
    """How the metrics of validation batches become one number."""

    AVG = 1
    SUM = 2
    MAX = 3
    MIN = 4


class MetricReducer(abc.ABC):
    """A metric of your own: gather in each process, then combine.

    Update it in any way you like from `train_batch` or `evaluate_batch`. Then `per_slot_reduce` runs on every
    rank, and `cross_slot_reduce` gets all their results.
    """

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget what was gathered; called at the start of every window and every validation."""

    @abc.abstractmethod
    def per_slot_reduce(self) -> Any:
        """Return what this rank gathered, as a picklable value."""

    @abc.abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Return the metric (or a dict of metrics, if it has no name) from the results of all ranks."""


class FunctionReducer(MetricReducer):
    """Gathers values with `update` and passes all of them to a function."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._values: list[Any] = []

    def update(self, value: Any) -> None:
        """Add a value."""
        self._values.append(value)

    def reset(self) -> None:
        """Forget all values."""
        self._values = []

    def per_slot_reduce(self) -> Any:
        """Return this rank's values."""
        return self._values

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Call the function with the values of all ranks, in the order of the batches, if there are any."""
        by_batch = itertools.chain(*itertools.zip_longest(*per_slot_metrics, fillvalue=NO_RESULT))
        values = [value for value in by_batch if value is not NO_RESULT]
        return self._function(values) if values else NO_RESULT


NO_RESULT: Any = object()
"""The result of a reducer that got no values on any rank, if that is known."""


def _state_of(reducer: MetricReducer) -> dict[str, Any]:
    """Return what a reducer holds: its `state_dict` if it has one, else its attributes that are plain data."""
    if isinstance(reducer, TorchMetricsReducer):
        return {"members": [dict(m.metric_state) | {"_update_count": m._update_count} for m in reducer.members]}
    if callable(state_dict := getattr(reducer, "state_dict", None)):
        return {"state": state_dict()}
    return {"attributes": {name: value for name, value in vars(reducer).items() if is_plain(value)}}


def _restore(reducer: MetricReducer, saved: Mapping[str, Any]) -> None:
    """Restore what `_state_of` returned."""
    if "members" in saved and isinstance(reducer, TorchMetricsReducer):
        for member, state in zip(reducer.members, saved["members"], strict=True):
            for name, value in state.items():
                setattr(member, name, value)
    elif "state" in saved:
        reducer.load_state_dict(saved["state"])  # type: ignore[attr-defined]  # saved by its counterpart
    else:
        vars(reducer).update(saved["attributes"])


def is_plain(value: Any) -> bool:
    """Return whether a value is plain data: numbers, strings, tensors, arrays, and plain containers of such."""
    if type(value) is dict:
        return all(is_plain(key) and is_plain(one) for key, one in value.items())
    if type(value) in (list, tuple, set):
        return all(map(is_plain, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    return type(value) in _PLAIN_TYPES or isinstance(value, np.generic | Tensor)


class TorchMetricsReducer(MetricReducer):
    """A metric of the torchmetrics library, which synchronizes ranks itself."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.is_updated_somewhere = False
        """Whether any rank has updated the metric since the reset."""

    @property
    def is_updated(self) -> bool:
        """Whether this rank has updated the metric since the reset."""
        return all(member.update_called for member in self.members)

    @property
    def members(self) -> list[Any]:
        """The metrics of a collection, or the only one."""
        return list(self.metric.values()) if hasattr(self.metric, "values") else [self.metric]

    def reset(self) -> None:
        self.metric.reset()

    def per_slot_reduce(self) -> Any:
        """Return the computed metric; None if no rank has updated it since the reset."""
        if not self.is_updated_somewhere:
            return None
        with warnings.catch_warnings():  # of a rank without updates, such as one without validation batches
            warnings.filterwarnings("ignore", message=".*was called before the ``update`` method")
            return self.metric.compute()

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Return the metric, the same on all ranks."""
        return per_slot_metrics[0] if self.is_updated_somewhere else NO_RESULT


@dataclasses.dataclass(frozen=True, slots=True)
class _Wrapped:
    reducer: MetricReducer
    name: str | None
    for_training: bool
    for_validation: bool

    def clashes_with(self, other: _Wrapped) -> bool:
        """Return whether both would report under one name."""
        together = (self.for_training and other.for_training) or (self.for_validation and other.for_validation)
        return self.name is not None and self.name == other.name and together

    @property
    def title(self) -> str:
        kind = type(self.reducer).__name__
        return f"{self.name!r} ({kind})" if self.name else kind


class ReducerSet:
    """All reducers of a trial."""

    def __init__(self, distributed: DistributedContext) -> None:
        self._distributed = distributed
        self._wrapped: list[_Wrapped] = []
        self._warned: set[int] = set()

    def wrap(self, reducer: Any, name: str | None, for_training: bool, for_validation: bool) -> Any:
        """Add a reducer, function or torchmetrics metric; return what the trial updates."""
        if name is not None and not isinstance(name, str):
            raise MisuseError(f"wrap_reducer(name={name!r}): the name of a metric is a str.")
        if any(w.reducer is reducer or getattr(w.reducer, "metric", None) is reducer for w in self._wrapped):
            raise MisuseError(f"wrap_reducer({reducer!r}): this reducer is wrapped already; wrap each one once.")
        wrapped = _Wrapped(_adapted(reducer), name, for_training, for_validation)
        if any(wrapped.clashes_with(other) for other in self._wrapped):
            raise MisuseError(f"wrap_reducer(name={name!r}): another reducer reports by this name; use another name.")
        self._wrapped.append(wrapped)
        return reducer if isinstance(wrapped.reducer, TorchMetricsReducer) else wrapped.reducer

    def reset(self) -> None:
        """Reset all reducers."""
        for wrapped in self._wrapped:
            _guarded(wrapped, "reset", wrapped.reducer.reset)

    def reduce(self, for_training: bool) -> dict[str, Any]:
        """Return the metrics of the reducers that serve training, or validation. All ranks must call this."""
        if not self._chosen(for_training):
            return {}
        return self.combined(self._distributed.allgather(self.gathered(for_training)), for_training)

    def gathered(self, for_training: bool) -> list[Any]:
        """Return this rank's results, for `combined`. All ranks must call this."""
        chosen = self._chosen(for_training)
        self._agree_on_updates([wrapped.reducer for wrapped in chosen])
        mine = [_guarded(wrapped, "per_slot_reduce", wrapped.reducer.per_slot_reduce) for wrapped in chosen]
        return mine if self._distributed.size == 1 else to_cpu(mine)

    def combined(self, per_rank: Sequence[list[Any]], for_training: bool) -> dict[str, Any]:
        """Return the metrics of the reducers from the results of `gathered` on each rank."""
        metrics: dict[str, Any] = {}
        for position, wrapped in enumerate(self._chosen(for_training)):
            parts = [values[position] for values in per_rank]
            result = _guarded(wrapped, "cross_slot_reduce", wrapped.reducer.cross_slot_reduce, parts)
            if result is NO_RESULT:
                self._warn_of_no_values(wrapped, for_training)
            else:
                metrics |= _named(wrapped, result)
        return metrics

    def _warn_of_no_values(self, wrapped: _Wrapped, for_training: bool) -> None:
        """Warn once for each reducer, on the chief."""
        if id(wrapped) not in self._warned and self._distributed.is_chief:
            logger.warning(
                "The reducer %s got no values in a %s, so it has no result there. If it is never updated there, wrap "
                "it with for_%s=False.",
                wrapped.title,
                "window of training" if for_training else "validation",
                "training" if for_training else "validation",
            )
        self._warned.add(id(wrapped))

    def _chosen(self, for_training: bool) -> list[_Wrapped]:
        return [w for w in self._wrapped if (w.for_training if for_training else w.for_validation)]

    def _agree_on_updates(self, reducers: Sequence[MetricReducer]) -> None:
        """Let metrics that synchronize ranks themselves do so on all ranks or on none."""
        own = [reducer for reducer in reducers if isinstance(reducer, TorchMetricsReducer)]
        if not own:
            return
        updated = self._distributed.allgather([reducer.is_updated for reducer in own])
        for reducer, flags in zip(own, zip(*updated, strict=True), strict=True):
            reducer.is_updated_somewhere = any(flags)

    def state_dict(self) -> dict[str, Any]:
        """Return what each reducer has gathered; values that are not plain data are left out."""
        return {"gathered": [_state_of(wrapped.reducer) for wrapped in self._wrapped]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what the reducers had gathered; another number of reducers starts empty."""
        if len(state["gathered"]) == len(self._wrapped):
            for wrapped, values in zip(self._wrapped, state["gathered"], strict=True):
                _restore(wrapped.reducer, values)


def _adapted(reducer: Any) -> MetricReducer:
    if isinstance(reducer, MetricReducer):
        return reducer
    torchmetrics = sys.modules.get("torchmetrics")  # a program with such an object has imported it
    if torchmetrics and isinstance(reducer, (torchmetrics.Metric, torchmetrics.MetricCollection)):
        return TorchMetricsReducer(reducer)
    if isinstance(reducer, type) or not callable(reducer):
        raise MisuseError(
            f"wrap_reducer({reducer!r}): pass a function, an instance of pytorch.MetricReducer, or a "
            "torchmetrics metric."
        )
    return FunctionReducer(reducer)


def _guarded(wrapped: _Wrapped, method: str, call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except Exception as error:
        raise ValueError(f"The reducer {wrapped.title} failed in {method}: {type(error).__name__}: {error}") from error


def _named(wrapped: _Wrapped, result: Any) -> dict[str, Any]:
    if wrapped.name is not None:
        if isinstance(result, Mapping):
            raise MisuseError(
                f"The reducer {wrapped.title} returned the dict {result!r}, but has a name for a single value; "
                "wrap it without a name to report a dict."
            )
        return {wrapped.name: number_or_array(result)}
    if not isinstance(result, Mapping):
        raise MisuseError(
            f"The reducer {wrapped.title} returned {result!r}, but has no name; give wrap_reducer a name, "
            "or return a dict of metrics."
        )
    return {name: number_or_array(value) for name, value in result.items()}


def number_or_array(value: Any) -> Any:
    """Return a tensor or array as a number if it has one element, else as an array; other values as they are."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    is_number = isinstance(value, (np.generic, np.ndarray)) and value.size == 1
    return value.item() if is_number else value


def to_cpu(value: Any) -> Any:
    """Return nested values with their tensors on the CPU, so that they can be sent to another rank."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return map_plain(lambda _, one: to_cpu(one), value)


def mean(numbers: Sequence[Any]) -> float:
    """Return the mean of numbers, the same whatever their order."""
    try:
        return math.fsum(numbers) / len(numbers)
    except (OverflowError, ValueError):  # infinities of both signs, or a number beyond the largest float
        return float(mean_of(np.array([as_float(number) for number in numbers])))


def reduced(values: Sequence[Any], reducer: Reducer) -> Any:
    """Return one number for the values of a metric in batches.

    All elements of lists and arrays count. Returns the list of values if they are not numbers, or if shapes differ.
    """
    if reducer is Reducer.AVG and (are_floats(values) or all(isinstance(value, Real) for value in values)):
        return mean(values)
    array = as_array(list(values))
    if array is None:
        return list(values)
    with np.errstate(invalid="ignore", over="ignore"):
        return _REDUCTIONS[reducer](array).tolist()


_REDUCTIONS: Mapping[Reducer, Callable[[Any], Any]] = {
    Reducer.AVG: mean_of,
    Reducer.SUM: np.sum,
    Reducer.MAX: np.max,
    Reducer.MIN: np.min,
}
