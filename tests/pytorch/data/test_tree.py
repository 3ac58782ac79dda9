from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from determined.pytorch._data.tree import leaves, map_entries, map_leaves, map_plain


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict[str, Any]):
    """Entries that are attributes as well, as in the outputs of model libraries."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def test_leaves_come_in_order() -> None:
    data = {"a": [1, (2, Pair(3, {4}))], "b": collections.UserDict(c=None), "d": []}
    assert list(leaves(data)) == [1, 2, 3, {4}, None]


def test_a_leaf_is_its_only_leaf() -> None:
    assert list(leaves("text")) == ["text"]


def test_the_caller_may_decide_what_to_enter() -> None:
    data = [1, Pair(2, 3)]
    assert list(leaves(data, enter=lambda value: type(value) is list)) == [1, Pair(2, 3)]


def test_mapping_leaves_keeps_the_structure() -> None:
    data = {"a": [1, (2, Pair(3, 4))], "b": collections.OrderedDict(c=5)}
    assert map_leaves(str, data) == {"a": ["1", ("2", Pair("3", "4"))], "b": collections.OrderedDict(c="5")}


def test_the_output_of_a_model_keeps_its_type_and_its_attributes() -> None:
    output = ModelOutput(logits=torch.ones(2, dtype=torch.bfloat16))
    mapped = map_leaves(lambda leaf: leaf.float(), output)
    assert type(mapped) is ModelOutput
    assert list(mapped) == ["logits"]
    assert mapped.loss is None
    assert mapped.logits is mapped["logits"]
    assert mapped.logits.dtype is torch.float32
    assert output.logits.dtype is torch.bfloat16


def test_entries_are_mapped_with_their_keys() -> None:
    assert map_entries(lambda key, value: (key, value), {"a": 1}) == {"a": ("a", 1)}
    assert map_entries(lambda index, value: (index, value), Pair(5, 6)) == Pair((0, 5), (1, 6))


def test_a_state_dict_keeps_what_torch_attaches_to_it() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    mapped: Any = map_plain(lambda _, value: value, state)
    assert mapped is not state
    assert mapped._metadata == state._metadata


@pytest.mark.parametrize("value", [Pair(1, 2), collections.defaultdict(int, a=1), torch.Size([3]), "text", {1}])
def test_other_values_than_plain_containers_stay(value: Any) -> None:
    assert map_plain(lambda _, entry: None, value) is value
