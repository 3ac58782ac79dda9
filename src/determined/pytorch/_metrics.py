"""Windows of metrics, left on the device until the window ends."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from determined.pytorch._reducer import mean


class MetricWindow:
    """The metrics of the batches since the last report.

    On a GPU nothing is read before `take`, so that the host never waits between reports.
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, metrics: Any) -> None:
        """Keep what `train_batch` returned."""
        if type(metrics) is not dict:
            metrics = _as_dict(metrics)
        self._batches.append({name: hold(value) for name, value in metrics.items()})

    def take(self) -> list[dict[str, Any]]:
        """Return the metrics of each batch as numbers and arrays, and begin anew."""
        batches, self._batches = self._batches, []
        return read(batches)


def hold(value: Any) -> Any:
    """Return a metric so that nothing done later to the graph or the tensor changes it."""
    if isinstance(value, Tensor):
        if value.is_cpu:
            return value.item() if value.numel() == 1 else value.detach().clone()
        # A tensor that was written in place before may be so again.
        return _Held(value.detach() if value._version == 0 else value.detach().clone())
    return value


class _Held:
    """A tensor on a device, and the version in which it was reported."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version


def read(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return batches of held metrics as numbers and arrays, moved from the device in one transfer."""
    places = [(batch, name) for batch in batches for name, value in batch.items() if type(value) is _Held]
    if places:
        _read_device(places)
    for batch in batches:
        for name, value in batch.items():
            if not isinstance(value, (float, int)):
                batch[name] = _plain(value)
    return batches


def _read_device(places: list[tuple[dict[str, Any], str]]) -> None:
    held = [batch[name] for batch, name in places]
    changed = {name for (_, name), h in zip(places, held, strict=True) if h.tensor._version != h.version}
    for name in sorted(changed):
        warnings.warn(
            f"The metric {name!r} was changed in place after it was returned, so some of its reported values are "
            "those of a later batch; return a copy, such as value.clone().",
            stacklevel=2,
        )
    flat = torch.cat([h.tensor.reshape(-1).double() for h in held]).cpu()
    start = 0
    for (batch, name), h in zip(places, held, strict=True):
        end = start + h.tensor.numel()
        part = flat[start:end]
        batch[name] = part.item() if h.tensor.numel() == 1 else part.reshape(h.tensor.shape).numpy()
        start = end


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


def averages(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of every metric over the batches that have it."""
    columns: dict[str, list[Any]] = {}
    for batch in batches:
        for name, value in batch.items():
            columns.setdefault(name, []).append(value)
    return {name: _average(name, values) for name, values in columns.items()}


def _average(name: str, values: list[Any]) -> Any:
    if all(type(value) is float for value in values):
        return mean(values)
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
