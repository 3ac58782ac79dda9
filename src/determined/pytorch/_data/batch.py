"""Batches as nested structures: their number of samples, and how they move to a device."""

from __future__ import annotations

import functools
import itertools
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from determined.pytorch._data.tree import PLAIN_CONTAINERS, is_container, leaves, map_entries, map_leaves

TorchData: TypeAlias = dict[str, Tensor] | Sequence[Tensor] | Tensor
"""The usual types of batches."""

# Plain values that stay where they are without a warning, such as file names and ids beside the tensors.
_NEVER_MOVED = (str, bytes, int, float, complex, type(None), np.generic)

_LENGTH_REMEDY = "override get_batch_length(batch) in the trial to return the number of samples."


def data_length(data: Any) -> int:
    """Return the number of samples in a batch: the size of the first dimension of its first array.

    The first value of a container counts, at any depth. Raises `ValueError` for an empty container or an array
    without dimensions, and `TypeError` for other types.

        >>> data_length({"image": torch.zeros(8, 3), "label": torch.zeros(8)})
        8
    """
    while is_container(data):
        values = list(itertools.islice(data.values() if isinstance(data, Mapping) else data, 1))
        if not values:
            raise ValueError(
                f"A batch is or begins with the empty container {data!r}; its first value counts the samples: put a "
                f"tensor first, or {_LENGTH_REMEDY}"
            )
        (data,) = values
    if not isinstance(data, (Tensor, np.ndarray)):
        raise TypeError(
            f"A batch, or the first value in it, is {data!r} of type {type(data).__name__}; the "
            "number of samples is known for tensors, arrays, and dicts, lists and tuples that begin with one: "
            f"{_LENGTH_REMEDY}"
        )
    if data.ndim == 0:
        raise ValueError(
            f"A batch begins with {data!r}, which has no dimensions; the first dimension counts the samples: "
            f"give it one, or {_LENGTH_REMEDY}"
        )
    return int(data.shape[0])


def digest(data: Any) -> int | None:
    """Return a checksum of all tensors and arrays in a batch; None if it has none."""
    found = None
    for leaf in leaves(data):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            found = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), found or 0)
    return found


def to_device(data: Any, device: torch.device | str | int, warned_types: set[type] | None = None) -> Any:
    """Return the same structure with its tensors on `device`.

    Enters dicts, lists, tuples and named tuples at any depth and keeps their types. NumPy arrays become tensors; other
    objects with a `to` method are moved with `to(device)`. Other values stay as they are, with a `UserWarning` for each
    type except plain ones such as strings and numbers. Types in the set `warned_types` get no warning; types that get
    one are added to it.

        >>> to_device({"x": [torch.ones(1)], "name": "a"}, "cpu")
        {'x': [tensor([1.])], 'name': 'a'}
    """
    target = device if type(device) is torch.device else torch.device(device)
    return _move(data, target, set() if warned_types is None else warned_types)


def mover(device: torch.device, warned_types: set[type]) -> Callable[[Any], Any]:
    """Return `to_device` for one device, as a function of the batch alone."""
    move = functools.partial(_move, device=device, warned=warned_types)
    if device.type != "cpu":
        return move

    def unless_in_host_memory(batch: Any) -> Any:
        # A list or tuple of tensors in host memory is returned as it is.
        if type(batch) is list or type(batch) is tuple:
            for value in batch:
                if type(value) is not Tensor or not value.is_cpu:
                    break
            else:
                return batch
        return move(batch)

    return unless_in_host_memory


def _move(data: Any, device: torch.device, warned: set[type]) -> Any:
    # Exact types first: this runs for every batch, and nearly all batches hold only these.
    kind = type(data)
    if kind is Tensor:
        return data if data.device == device else _move_tensor(data, device)
    if kind is list:
        return [_move(value, device, warned) for value in data]
    if kind is dict:
        return {key: _move(value, device, warned) for key, value in data.items()}
    if kind is tuple:
        return tuple([_move(value, device, warned) for value in data])
    if isinstance(data, _NEVER_MOVED):
        return data
    return _move_uncommon(data, device, warned)


def _move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    # A non-blocking copy to host memory could be read before it is complete.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _move_uncommon(data: Any, device: torch.device, warned: set[type]) -> Any:
    if isinstance(data, Tensor):
        return _move_tensor(data, device)
    if isinstance(data, np.ndarray):
        tensor = _as_tensor(data, warned)
        return data if tensor is None else _move_tensor(tensor, device)
    # Before the containers: a container class with this method moves itself.
    if _moves_itself(data):
        return data.to(device)
    if is_container(data):
        return map_entries(lambda _, value: _move(value, device, warned), data)
    _warn_once(
        kind=type(data),
        warned=warned,
        message=f"A value of type {type(data).__qualname__} in a batch stays where it is: only tensors, "
        "arrays, dicts, lists, tuples and objects with a to(device) method move; give the class such a "
        "method, or move batches yourself after context.experimental.disable_auto_to_device().",
    )
    return data


def _moves_itself(data: Any) -> bool:
    return callable(getattr(data, "to", None))


def _as_tensor(array: np.ndarray[Any, Any], warned: set[type]) -> Tensor | None:
    """Return the array as a tensor, sharing memory if possible; None if there are no tensors of its type."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:
        _warn_once(
            kind=array.dtype.type,
            warned=warned,
            message=f"A NumPy array of dtype {array.dtype} in a batch stays as it is: tensors hold only "
            "numbers and booleans; encode it as numbers, or use a list to carry such values along.",
        )
        return None


def host_bytes(data: Any) -> int | None:
    """Return the bytes of tensors and arrays in host memory; None if there is more than those and plain values."""

    def is_moved_by_entries(value: Any) -> bool:
        return type(value) in PLAIN_CONTAINERS or (is_container(value) and not _moves_itself(value))

    total = 0
    for leaf in leaves(data, enter=is_moved_by_entries):
        if isinstance(leaf, Tensor):
            total += leaf.nbytes if leaf.is_cpu and leaf.layout is torch.strided else 0
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            total += leaf.nbytes
        elif not isinstance(leaf, _NEVER_MOVED):
            return None
    return total


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """Return the same structure with the function's results for its tensors and arrays."""

    def mapped(leaf: Any) -> Any:
        tensor = _as_tensor(leaf, set()) if isinstance(leaf, np.ndarray) else leaf
        return function(tensor) if isinstance(tensor, Tensor) else leaf

    return map_leaves(mapped, data)


def channels_last(move: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that moves batches, with images in the memory format that is fastest for convolutions."""
    return lambda batch: map_tensors(_channels_last, move(batch))


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _warn_once(*, kind: type, warned: set[type], message: str) -> None:
    if kind not in warned:
        warned.add(kind)
        warnings.warn(message, UserWarning, stacklevel=2)
