"""Copies of a state in host memory: independent of it, and no larger."""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from determined.pytorch._checkpoint.snapshot import HostCopier
from trials import assert_same

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    if not tensor.numel() or not tensor.dim():
        return tensor
    if draw(st.booleans()):
        tensor = tensor.repeat_interleave(2, dim=0)[::2]
    return tensor.transpose(0, -1) if draw(st.booleans()) else tensor


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.one_of(st.integers(0, 9), st.text(max_size=3))
    maps = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        maps, maps.map(collections.OrderedDict), st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)
    )


leaves = st.one_of(
    tensors(), st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.sets(st.integers()), st.binary()
)
states = st.dictionaries(st.text(max_size=3), st.recursive(leaves, containers, max_leaves=12), max_size=4)


def change_everything(value: Any) -> None:
    """Change all parts of a structure that can be changed in place."""
    if isinstance(value, Tensor):
        value.logical_not_() if value.dtype is torch.bool else value.add_(1)
    elif isinstance(value, dict):
        for one in value.values():
            change_everything(one)
        value["another"] = 1
    elif isinstance(value, list | tuple):
        for one in value:
            change_everything(one)
        if isinstance(value, list):
            value.append(1)
    elif isinstance(value, set):
        value.add("another")


@given(state=states)
def test_nothing_done_to_a_state_changes_its_copy(state: dict[str, Any]) -> None:
    as_it_was = copy.deepcopy(state)
    copied = HostCopier().copy(state)
    change_everything(state)
    assert_same(copied, as_it_was)


@given(first=states, second=states)
def test_copy_of_another_state_into_the_same_buffers_is_right(first: dict[str, Any], second: dict[str, Any]) -> None:
    copier = HostCopier()
    copier.copy(first)
    assert_same(copier.copy(second), second)


def test_attributes_of_state_dicts_are_kept_and_copied() -> None:
    state = {"model": torch.nn.BatchNorm1d(2).state_dict()}
    copied = HostCopier().copy(state)["model"]
    assert copied._metadata == state["model"]._metadata
    state["model"]._metadata[""]["version"] = 99
    assert copied._metadata[""]["version"] != 99


def adam_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in inner for tensor in tensors_in(one)]


def storages_in(value: Any) -> dict[int, int]:
    """Return the sizes of all different pieces of memory, by their addresses."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(value)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_next_copy_uses_the_memory_of_the_one_before() -> None:
    copier, state = HostCopier(), adam_state()
    first = [tensor.data_ptr() for tensor in tensors_in(copier.copy(state))]
    assert [tensor.data_ptr() for tensor in tensors_in(copier.copy(state))] == first


def test_copy_takes_as_much_memory_as_the_state() -> None:
    state = adam_state()
    assert sum(storages_in(HostCopier().copy(state)).values()) == sum(storages_in(state).values())


def test_copy_of_a_part_takes_the_memory_of_the_part() -> None:
    whole = torch.zeros(1000)
    assert sum(storages_in(HostCopier().copy({"part": whole[:10]})).values()) == whole[:10].nbytes


def test_buffers_that_are_not_used_any_more_are_let_go() -> None:
    copier = HostCopier()
    large = copier.copy({"a": torch.zeros(1000)})["a"]
    reference = torch.multiprocessing.reductions.StorageWeakRef(large.untyped_storage())
    del large
    copier.copy({"b": torch.zeros(1)})
    assert reference.expired()


def test_tied_weights_stay_one_tensor() -> None:
    weight = torch.randn(3, 3)
    copied = HostCopier().copy({"a": weight, "b": [weight]})
    assert copied["a"] is copied["b"][0]


def test_views_of_one_memory_that_differ_are_told_apart() -> None:
    numbers = torch.tensor([1 + 2j, 3 + 4j])
    state = {"plain": numbers, "conjugated": numbers.conj(), "half": numbers[:1], "matrix": numbers.view(2, 1)}
    copied = HostCopier().copy(state)
    assert all(torch.equal(copied[name], state[name]) for name in state)


def test_memory_format_is_kept() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    copier = HostCopier()
    for _ in range(2):
        copied = copier.copy({"image": image})["image"]
        assert copied.stride() == image.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(0, 4),
        torch.tensor(1.5),
        torch.ones(1, 3).expand(4, 3),
        torch.randn(4, 6)[::2, 1::3],
        torch.randn(3).bfloat16(),
        torch.nn.Parameter(torch.ones(2)) * 2,
    ],
    ids=["sparse", "empty", "scalar", "expanded", "strided", "bfloat16", "in a graph"],
)
def test_tensor_of_every_kind_is_copied(tensor: Tensor) -> None:
    copier = HostCopier()
    for _ in range(2):
        copied = copier.copy({"one": tensor})["one"]
        assert not copied.requires_grad
        assert copied.layout is tensor.layout
        assert_same(copied, tensor.detach())
