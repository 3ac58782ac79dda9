"""Windows of metrics, left on the device until the window ends."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from determined.core.metrics import MISSING, BatchColumns, are_floats, as_array, mean_of
from determined.pytorch._data.tree import leaves, map_leaves
from determined.pytorch._metrics.reducers import Reducer, is_plain, mean, number_or_array, reduced


class MetricWindow:
    """The metrics of the batches since the last report, a column for each name.

    Tensors on a GPU are not read before `take`, so the host never waits between reports.
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, metrics: Any) -> None:
        """Keep what `train_batch` returned."""
        if type(metrics) is not dict:
            metrics = _as_dict(metrics)
        columns = self._columns
        if metrics.keys() != columns.keys():
            self._match(metrics)
        for name, value in metrics.items():
            # Same as `hold` for the usual metrics on the CPU, without the call.
            is_number = type(value) is Tensor and value.is_cpu and value.numel() == 1
            columns[name].append(value.item() if is_number else hold(value))
        self._count += 1

    def take(self) -> BatchColumns:
        """Return the metrics of each batch, with arrays for tensors, and empty the window."""
        batches = self.peek()
        self._columns, self._count = {}, 0
        return batches

    def peek(self) -> BatchColumns:
        """Return what `take` would, and keep it."""
        return BatchColumns(_read(self._columns), self._count)

    def state_dict(self) -> dict[str, Any]:
        """Return the batches that were not reported yet, as plain data."""
        columns = plain_data(self.peek()).columns
        present = {name: [value is not MISSING for value in column] for name, column in columns.items()}
        values = {name: [None if v is MISSING else v for v in column] for name, column in columns.items()}
        return {"count": self._count, "values": values, "present": present}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the batches that `state_dict` returned."""
        self._count = state["count"]
        for name, values in state["values"].items():
            marks = state["present"][name]
            self._columns[name] = [v if here else MISSING for v, here in zip(values, marks, strict=True)]

    def _match(self, metrics: Mapping[str, Any]) -> None:
        """Make columns for new names, and mark those that this batch does not have."""
        for name in metrics:
            self._columns.setdefault(name, [MISSING] * self._count)
        for name, column in self._columns.items():
            if name not in metrics:
                column.append(MISSING)


def hold(value: Any) -> Any:
    """Return a metric that does not change when the program later changes the tensor or the container."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        if value.is_cpu:
            return value.item() if value.numel() == 1 else value.detach().clone()
        return hold_on_device(value)
    if value is None:  # a metric that this batch does not have
        return MISSING
    if isinstance(value, (float, int, str)):
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, (list, tuple)):
        return [None if one is None else hold(one) for one in value]
    if isinstance(value, Mapping):
        return {key: None if one is None else hold(one) for key, one in value.items()}
    return value


def hold_on_device(tensor: Tensor) -> _Held:
    """Return a tensor that stays on its device, with what is needed to notice a change in place."""
    if tensor.is_inference():
        # Inference tensors have no version counter, so only a copy is safe; the copy is an ordinary tensor.
        with torch.inference_mode(False):
            return _Held(tensor.clone())
    # A tensor that was written in place before may be written again.
    return _Held(tensor.detach() if tensor._version == 0 else tensor.detach().clone())


class _Held:
    """A tensor on a device, the version in which it was reported, and its value once it was read."""

    __slots__ = ("tensor", "value", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.value: Any = None


def _read(columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return columns of held metrics as numbers and arrays, moved from each device in one transfer."""
    by_device: dict[torch.device, list[_Held]] = {}
    for name, column in columns.items():
        unread = [held for held in _held_in(column) if held.value is None]
        if any(held.tensor._version != held.version for held in unread):
            warnings.warn(
                f"The metric {name!r} was changed in place after it was returned, so some of its reported values are "
                "those of a later batch; return a copy, such as value.clone().",
                stacklevel=2,
            )
        for held in unread:
            by_device.setdefault(held.tensor.device, []).append(held)
    for unread in by_device.values():
        _read_device(unread)
    return {name: _values_of(column) for name, column in columns.items()}


def _held_in(column: list[Any]) -> list[_Held]:
    kinds = {*map(type, column)}
    if kinds == {float}:
        return []
    return column if kinds == {_Held} else [one for one in leaves(column) if type(one) is _Held]


def _read_device(unread: Sequence[_Held]) -> None:
    """Read the values of tensors on one device, all in one transfer."""
    tensors = [held.tensor for held in unread]
    if len({tensor.dtype for tensor in tensors}) > 1:  # counts must not be rounded to the dtype of a loss
        tensors = [tensor.double() for tensor in tensors]
    if not any(tensor.dim() for tensor in tensors):  # nearly always; the other branch is slow
        values = torch.stack(tensors).tolist()
    else:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).double().cpu()
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        arrays = [part.reshape(tensor.shape).numpy() for part, tensor in zip(parts, tensors, strict=True)]
        values = [array.item() if array.size == 1 else array for array in arrays]
    for held, value in zip(unread, values, strict=True):
        held.value = value


def _values_of(column: list[Any]) -> list[Any]:
    kinds = {*map(type, column)}
    if kinds == {float}:
        return column
    values: list[Any] = [held.value for held in column] if kinds == {_Held} else map_leaves(_value_of, column)
    return values


def _value_of(metric: Any) -> Any:
    return metric.value if type(metric) is _Held else number_or_array(metric)


def plain_data(batches: BatchColumns) -> BatchColumns:
    """Return batches that can be pickled and saved: with the names of their types in place of objects."""

    def plain(value: Any) -> Any:
        return value if value is MISSING or is_plain(value) else f"<{type(value).__name__}>"

    columns = {
        name: column if are_floats(column) else [plain(value) for value in column]
        for name, column in batches.columns.items()
    }
    return BatchColumns(columns, len(batches))


def _as_dict(metrics: Any) -> dict[str, Any]:
    if isinstance(metrics, Tensor):
        return {"loss": metrics}
    if isinstance(metrics, Mapping):
        return dict(metrics)
    raise TypeError(
        f'train_batch() returned {metrics!r}; return the loss tensor or a dict of metrics, such as {{"loss": loss}}.'
    )


def averaged_over_ranks(parts: Sequence[BatchColumns]) -> BatchColumns:
    """Return one batch for each that all ranks trained together, with the mean of every metric or None."""
    merged = BatchColumns.interleaved(parts)
    size, count = len(parts), max(map(len, parts), default=0)
    if len(merged) != size * count:  # a rank has fewer, as after a resume by another number of ranks
        return parts[0]
    columns = {
        name: [_average_of_ranks(column[place : place + size]) for place in range(0, len(merged), size)]
        for name, column in merged.columns.items()
    }
    return BatchColumns(columns, count)


def _average_of_ranks(values: Sequence[Any]) -> Any:
    """Return the mean of a batch's values over ranks; arrays and lists stay arrays, as in other batches."""
    if are_floats(values):
        return mean(values)
    present = [value for value in values if value is not MISSING]
    if not present:
        return MISSING
    array = as_array(present)
    if array is None:
        return None
    return mean(present) if array.ndim == 1 else mean_of(array, axis=0)


def averages(batches: BatchColumns) -> dict[str, Any]:
    """Return the mean of every metric over the batches that have it, or the list of its values if it has no mean."""
    return {name: reduced(values, Reducer.AVG) for name, values in present_values(batches).items()}


def present_values(batches: BatchColumns) -> dict[str, Sequence[Any]]:
    """Return the values of each metric in the batches that have it, without metrics that no batch has."""
    columns = {
        name: column if are_floats(column) else [value for value in column if value is not MISSING]
        for name, column in batches.columns.items()
    }
    return {name: values for name, values in columns.items() if values}
