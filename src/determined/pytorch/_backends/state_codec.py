"""How the state of models and optimizers gets into a checkpoint and out of it."""

from __future__ import annotations

import collections
import copy
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

SHARDS_FOLDER = "shards"
REPLICATED = "all"
OWN = "own"
UNREDUCED = " (unreduced)"
"""What follows the name of a gradient of one rank that is still to be averaged over all, beside one that is."""

_MARK = "__shard__"
_CONTAINERS = (dict, list, tuple, collections.OrderedDict)


class Reference(NamedTuple):
    """A tensor that is not in the state of a checkpoint, but in pieces in a folder beside it."""

    folder: pathlib.Path
    key: str
    placement: int | str
    """The dimension along which ranks shared it; or that it was `REPLICATED` on all, or of one rank's `OWN`."""


class Shards(Protocol):
    """Tensors taken out of a state, to be written by the ranks that have them."""

    def take(self, value: Any, place: str) -> Any:
        """Return nested values with marks in place of the tensors that ranks share, and keep those."""
        ...

    def take_own(self, value: Any, place: str) -> Any:
        """Return nested values with marks in place of all tensors, of which each rank has others, and keep those."""
        ...

    def write(self, folder: pathlib.Path) -> None:
        """Write what was taken below the folder of a checkpoint. All ranks must call this."""
        ...


class StateCodec(Protocol):
    """How this process keeps the state of models and optimizers."""

    def shards(self) -> Shards | None:
        """Return where to put tensors that ranks share; None where every rank has all."""
        ...

    def attach(self, value: Any) -> Any:
        """Return nested values with the tensors that references in them stand for. All ranks must call this."""
        ...

    def fit_model(self, model: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return saved weights in the form that the model takes."""
        ...

    def fit_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the saved state of an optimizer in the form that it takes."""
        ...

    def gradients(self, models: Sequence[nn.Module]) -> dict[str, Tensor]:
        """Return gradients that outlive the batch, as those between aggregated steps do."""
        ...

    def restore_gradients(self, models: Sequence[nn.Module], saved: Mapping[str, Tensor], unreduced: bool) -> None:
        """Put back what `gradients` returned, and drop all others.

        `unreduced` tells whether whole gradients are those of one rank, still to be averaged over all.
        """
        ...


class UnshardedState:
    """The state of models that every rank has whole."""

    def shards(self) -> Shards | None:
        """Return nothing: all is in the state."""
        return None

    def attach(self, value: Any) -> Any:
        """Return nested values with whole tensors, on the CPU, in place of references."""
        if not any(True for _ in references(value)):
            return value
        from determined.pytorch._backends.shards import whole_tensors

        return with_tensors(value, whole_tensors(set(references(value))))

    def fit_model(self, model: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the weights."""
        return weights

    def fit_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state."""
        return state

    def gradients(self, models: Sequence[nn.Module]) -> dict[str, Tensor]:
        """Return the gradients that there are."""
        return {name: parameter.grad for name, parameter in named(models) if parameter.grad is not None}

    def restore_gradients(self, models: Sequence[nn.Module], saved: Mapping[str, Tensor], unreduced: bool) -> None:
        """Put saved gradients back, and drop all others."""
        for name, parameter in named(models):
            gradient = saved.get(name)
            if (own := saved.get(name + UNREDUCED)) is not None:  # of a run with spread models
                gradient = own if gradient is None else gradient + own
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)


def named(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of several models, by number and name."""
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            yield f"{index}.{name}", parameter


def mark_of(key: str, placement: int | str) -> dict[str, Any]:
    """Return what stands in a state for a tensor that is kept beside it."""
    return {_MARK: [key, placement]}


def with_references(value: Any, folder: pathlib.Path) -> Any:
    """Return nested values with references in place of marks."""
    if type(value) is dict and value.keys() == {_MARK}:
        return Reference(folder, *_checked_mark(value[_MARK]))
    return mapped(lambda one, _: with_references(one, folder), value, "")


def _checked_mark(mark: Any) -> tuple[str, int | str]:
    if isinstance(mark, list) and len(mark) == 2 and isinstance(mark[0], str):
        key, placement = mark
        if placement in (REPLICATED, OWN) or (type(placement) is int and placement >= 0):
            return key, placement
    raise ValueError(f"{mark!r} does not tell where a tensor is")


def references(value: Any) -> Iterator[Reference]:
    """Yield all references in nested values."""
    if isinstance(value, Reference):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from references(one)
    elif type(value) in (list, tuple):
        for one in value:
            yield from references(one)


def with_tensors(value: Any, tensors: Mapping[Reference, Tensor]) -> Any:
    """Return nested values with tensors in place of references."""
    if isinstance(value, Reference):
        return tensors[value]
    return mapped(lambda one, _: with_tensors(one, tensors), value, "")


def mapped(function: Callable[[Any, str], Any], value: Any, place: str) -> Any:
    """Return a container with what the function gives for each of its entries and their places; else the value."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return value
    if isinstance(value, dict):
        entries = {key: function(one, f"{place}.{key}") for key, one in value.items()}
        if kind is dict:
            return entries
        copied = copy.copy(value)  # keeps what torch hangs on to state dicts
        copied.update(entries)
        return copied
    return kind(function(one, f"{place}.{index}") for index, one in enumerate(value))
