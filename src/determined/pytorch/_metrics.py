"""Windows of metrics, left on the device until the window ends."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from determined.core._columns import MISSING, BatchColumns, are_floats
from determined.pytorch._reducer import mean


class MetricWindow:
    """The metrics of the batches since the last report, a column for each name.

    On a GPU nothing is read before `take`, so that the host never waits between reports.
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
            # What `hold` does for nearly all metrics of a training on the CPU, without the call.
            is_number = type(value) is Tensor and value.is_cpu and value.numel() == 1
            columns[name].append(value.item() if is_number else hold(value))
        self._count += 1

    def take(self) -> BatchColumns:
        """Return the metrics of each batch as numbers and arrays, and begin anew."""
        batches = self.peek()
        self._columns, self._count = {}, 0
        return batches

    def peek(self) -> BatchColumns:
        """Return what `take` would, and keep it."""
        return BatchColumns(_read(self._columns), self._count)

    def state_dict(self) -> dict[str, Any]:
        """Return the batches that were not reported yet, as numbers and arrays."""
        columns = _read(self._columns)
        present = {name: [value is not MISSING for value in column] for name, column in columns.items()}
        values = {name: [None if v is MISSING else v for v in column] for name, column in columns.items()}
        return {"count": self._count, "values": values, "present": present}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batches of `state_dict`."""
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
    """Return a metric so that nothing done later to the graph, the tensor or the array changes it."""
    if isinstance(value, Tensor):
        if value.is_cpu:
            return value.item() if value.numel() == 1 else value.detach().clone()
        # A tensor that was written in place before may be so again.
        return _Held(value.detach() if value._version == 0 else value.detach().clone())
    if value is None:  # a metric that this batch does not have
        return MISSING
    return value.copy() if type(value) is np.ndarray else value


class _Held:
    """A tensor on a device, and the version in which it was reported."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version


def _read(columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return columns of held metrics as numbers and arrays, moved from the device in one transfer."""
    held = [(column, i) for column in columns.values() for i, value in enumerate(column) if type(value) is _Held]
    if held:
        _warn_of_changes(columns)
        _read_device(held)
    return {name: _plain_column(column) for name, column in columns.items()}


def _warn_of_changes(columns: Mapping[str, list[Any]]) -> None:
    for name, column in columns.items():
        if any(type(value) is _Held and value.tensor._version != value.version for value in column):
            warnings.warn(
                f"The metric {name!r} was changed in place after it was returned, so some of its reported values are "
                "those of a later batch; return a copy, such as value.clone().",
                stacklevel=2,
            )


def _read_device(places: list[tuple[list[Any], int]]) -> None:
    """Replace held tensors by their values, all in one transfer."""
    tensors = [column[i].tensor for column, i in places]
    if len({tensor.dtype for tensor in tensors}) > 1:  # counts must not be rounded to the format of a loss
        tensors = [tensor.double() for tensor in tensors]
    if not any(tensor.dim() for tensor in tensors):  # nearly always; the other way takes a while for each batch
        for (column, i), value in zip(places, torch.stack(tensors).tolist(), strict=True):
            column[i] = value
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).double().cpu()
    start = 0
    for (column, i), tensor in zip(places, tensors, strict=True):
        end = start + tensor.numel()
        part = flat[start:end]
        column[i] = part.item() if tensor.numel() == 1 else part.reshape(tensor.shape).numpy()
        start = end


def _plain_column(column: list[Any]) -> list[Any]:
    if are_floats(column):
        return column
    return [_plain(value) for value in column]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, (np.generic, np.ndarray)) and value.size == 1:
        return value.item()
    return value


def _as_dict(metrics: Any) -> dict[str, Any]:
    if isinstance(metrics, Tensor):
        return {"loss": metrics}
    if isinstance(metrics, Mapping):
        return dict(metrics)
    raise TypeError(
        f'train_batch() returned {metrics!r}; return the loss tensor or a dict of metrics, such as {{"loss": loss}}.'
    )


def averaged_over_ranks(parts: Sequence[BatchColumns]) -> BatchColumns:
    """Return one batch for each that all ranks trained together, with the mean of every metric."""
    merged = BatchColumns.interleaved(parts)
    size, count = len(parts), max(map(len, parts), default=0)
    if len(merged) != size * count:  # a rank has fewer, as after a resume by another number of ranks
        return parts[0]
    columns = {
        name: [_average_or_missing(name, column[place : place + size]) for place in range(0, len(merged), size)]
        for name, column in merged.columns.items()
    }
    return BatchColumns(columns, count)


def _average_or_missing(name: str, values: Sequence[Any]) -> Any:
    return MISSING if all(value is MISSING for value in values) else _average(name, values)


def averages(batches: BatchColumns) -> dict[str, Any]:
    """Return the mean of every metric over the batches that have it."""
    present = {name: column for name, column in batches.columns.items() if {*map(type, column)} != {type(MISSING)}}
    return {name: _average(name, column) for name, column in present.items()}


def _average(name: str, column: Sequence[Any]) -> Any:
    if are_floats(column):
        return mean(column)
    values = [value for value in column if value is not MISSING]
    for value in values:
        if not isinstance(value, (Real, np.ndarray)):
            raise TypeError(
                f"The training metric {name!r} has the value {value!r}, which has no average; return numbers, "
                "tensors or arrays from train_batch()."
            )
    if len({np.shape(value) for value in values}) > 1:
        raise ValueError(
            f"The training metric {name!r} has another shape in each batch, so it has no average; "
            "return a fixed number of values, or reduce it to one."
        )
    return mean(values)
