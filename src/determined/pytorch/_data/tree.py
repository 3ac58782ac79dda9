"""Nested containers of tensors and other values: batches, metrics and states.

Containers are mappings, lists and tuples, including subclasses such as named tuples. Everything else is a leaf:
tensors, arrays, strings, sets, data classes. A container is rebuilt in its own type, or in the plain type (dict, list,
tuple) if its class cannot be made from the entries.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

PLAIN_CONTAINERS = frozenset({dict, list, tuple, collections.OrderedDict})
"""The types of containers in a checkpoint's state. There, subclasses are leaves: they may hold more than entries."""


def is_container(data: Any) -> bool:
    """Return whether data is a container rather than a leaf."""
    # The test for a mapping of another class than dict is slow, and most leaves are tensors.
    return isinstance(data, (list, tuple, dict)) or (not isinstance(data, Tensor) and isinstance(data, Mapping))


def leaves(data: Any, enter: Callable[[Any], bool] = is_container) -> Iterator[Any]:
    """Yield all leaves, in order. `enter` returns whether a value is a container."""
    if not enter(data):
        yield data
        return
    for value in data.values() if isinstance(data, Mapping) else data:
        if enter(value):
            yield from leaves(value, enter)
        else:
            yield value


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Return the same structure with the function's results for its leaves."""
    if is_container(data):
        return map_entries(lambda _, value: map_leaves(function, value), data)
    return function(data)


def map_entries(function: Callable[[Any, Any], Any], container: Any) -> Any:
    """Return a container of the same type with the results of `function(key or index, value)` for its entries."""
    if isinstance(container, Mapping):
        return _mapping_like(container, {key: function(key, value) for key, value in container.items()})
    return _sequence_like(container, [function(index, value) for index, value in enumerate(container)])


def map_plain(function: Callable[[Any, Any], Any], value: Any) -> Any:
    """Return `map_entries(function, value)` for a plain container, and any other value as it is."""
    return map_entries(function, value) if type(value) in PLAIN_CONTAINERS else value


def _mapping_like(original: Mapping[Any, Any], entries: dict[Any, Any]) -> Mapping[Any, Any]:
    if type(original) is dict:
        return entries
    try:
        if not isinstance(original, (dict, collections.UserDict)):
            return type(original)(entries)  # type: ignore[call-arg]  # the except below is for those that refuse
        # A copy keeps constructor arguments, such as the factory of a defaultdict.
        rebuilt = copy.copy(original)
        for key, value in entries.items():
            rebuilt[key] = value
        return rebuilt
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return entries


def _sequence_like(original: list[Any] | tuple[Any, ...], entries: list[Any]) -> Any:
    if type(original) is list:
        return entries
    make = getattr(original, "_make", type(original))  # named tuples take their fields one by one
    try:
        return make(entries)
    except (TypeError, ValueError, AttributeError):
        return entries if isinstance(original, list) else tuple(entries)
