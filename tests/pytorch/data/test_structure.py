from __future__ import annotations

import collections
import dataclasses
import doctest
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from determined.pytorch._data import batch as batch_module
from determined.pytorch._data.batch import data_length, to_device

CPU = torch.device("cpu")
META = torch.device("meta")  # a second device that every machine has


class Pair(NamedTuple):
    image: Any
    to: Any  # a field that looks like the method


class Labelled(list[Any]):
    pass


LEAVES = st.one_of(
    st.integers(0, 5).map(torch.ones),
    st.integers(0, 5).map(lambda n: np.arange(n, dtype=np.float32)),
    st.sampled_from(["name", b"bytes", 3, 2.5, 1j, True, None, np.float64(2.0)]),
)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(st.sampled_from("abcd"), children, max_size=3)
    lists = st.lists(children, max_size=3)
    return st.one_of(
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(list, items)),
        dicts.map(collections.UserDict),
        dicts.map(types.MappingProxyType),
        lists,
        lists.map(tuple),
        lists.map(Labelled),
        st.builds(Pair, children, children),
    )


STRUCTURES = st.recursive(LEAVES, containers, max_leaves=8)


def assert_moved(moved: Any, original: Any, device: torch.device) -> None:
    """The same types with the same values, and every array a tensor on the device."""
    if isinstance(original, (torch.Tensor, np.ndarray)):
        assert type(moved) is torch.Tensor
        assert moved.device == device
        assert device == META or torch.equal(moved, torch.as_tensor(original))
        assert moved.shape == original.shape
        return
    assert type(moved) is type(original)
    if isinstance(original, Mapping):
        assert list(moved) == list(original)
        for key in original:
            assert_moved(moved[key], original[key], device)
    elif isinstance(original, (list, tuple)):
        for one, other in zip(moved, original, strict=True):
            assert_moved(one, other, device)
    else:
        assert moved == original


@given(data=STRUCTURES, device=st.sampled_from([CPU, META]))
def test_a_moved_structure_has_the_same_types_and_values(data: Any, device: torch.device) -> None:
    assert_moved(to_device(data, device), data, device)


@given(data=STRUCTURES)
def test_moving_leaves_the_original_as_it_was(data: Any) -> None:
    to_device(data, META)
    assert_moved(to_device(data, CPU), data, CPU)


def test_a_device_may_be_given_by_name() -> None:
    assert to_device(torch.ones(2), "meta").device == META


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    tensor = torch.ones(2)
    assert to_device([tensor], CPU)[0] is tensor


def test_a_subclass_of_tensor_keeps_its_type() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert type(to_device(parameter, CPU)) is torch.nn.Parameter


def test_a_defaultdict_keeps_its_factory() -> None:
    moved = to_device(collections.defaultdict(list, x=torch.ones(1)), META)
    assert moved.default_factory is list


def test_a_counter_keeps_its_counts() -> None:
    assert to_device(collections.Counter("aab"), META) == collections.Counter("aab")


class Wrapped(Mapping[str, Any]):
    """A mapping that cannot be made from a dict alone."""

    def __init__(self, items: dict[str, Any], note: str) -> None:
        self._items, self._note = items, note

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def test_a_mapping_that_cannot_be_rebuilt_becomes_a_dict() -> None:
    moved = to_device(Wrapped({"x": torch.ones(1)}, "note"), META)
    assert type(moved) is dict
    assert moved["x"].device == META


class Numbered(list[Any]):
    """A list that cannot be made from its elements alone."""

    def __init__(self, items: list[Any], number: int) -> None:
        super().__init__(items)
        self.number = number


def test_a_list_that_cannot_be_rebuilt_becomes_a_plain_one() -> None:
    assert type(to_device(Numbered([torch.ones(1)], 3), META)) is list


class Encoding(collections.UserDict[str, torch.Tensor]):
    """A container that moves itself, as tokenizers return it; takes nothing but the device."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def test_an_object_with_a_to_method_moves_itself() -> None:
    encoding = Encoding({"ids": torch.ones(2)})
    moved = to_device({"text": encoding}, META)["text"]
    assert moved is encoding
    assert moved["ids"].device == META


def test_a_packed_sequence_stays_one() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    moved = to_device(packed, META)
    assert type(moved) is PackedSequence
    assert moved.data.device == META


READ_ONLY = np.arange(3)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "array",
    [
        READ_ONLY,
        np.arange(3)[::-1],
        np.arange(3, dtype=">i4"),
        np.array(3),
        np.array([True]),
        np.arange(6).reshape(2, 3).T,
        np.zeros((0, 3)),
    ],
    ids=["read-only", "reversed", "big-endian", "0-d", "bool", "transposed", "empty"],
)
def test_arrays_of_every_layout_become_tensors(array: np.ndarray[Any, Any]) -> None:
    moved = to_device(array, CPU)
    assert moved.tolist() == array.tolist()


def test_a_read_only_array_is_copied() -> None:
    to_device(READ_ONLY, CPU).fill_(7)
    assert READ_ONLY.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "array",
    [np.array(["a", "b"]), np.array([{}, []], dtype=object), np.array(["2020-01-01"], dtype="datetime64[D]")],
    ids=["str", "object", "datetime64"],
)
def test_an_array_that_no_tensor_can_hold_stays_and_is_told_once(array: np.ndarray[Any, Any]) -> None:
    warned: set[type] = set()
    with pytest.warns(UserWarning, match=r"NumPy array of dtype .* stays as it is.*encode it as numbers"):
        assert to_device([array], CPU, warned)[0] is array
    assert to_device(array, CPU, warned) is array


@dataclasses.dataclass
class Graph:
    nodes: torch.Tensor


def test_a_value_that_cannot_move_stays_and_is_told_once_for_its_type() -> None:
    graph, warned = Graph(torch.ones(1)), set[type]()
    with pytest.warns(UserWarning, match=r"type Graph in a batch stays where it is.*give the class such a"):
        assert to_device({"graph": graph}, CPU, warned)["graph"] is graph
    assert to_device(graph, CPU, warned) is graph


def test_the_types_that_were_told_are_in_the_set() -> None:
    warned: set[type] = set()
    with pytest.warns(UserWarning, match="type set"):
        to_device([{1, 2}], CPU, warned)
    assert warned == {set}


def test_without_a_set_every_call_tells_once_for_a_type() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        to_device([{1}, {2}], CPU)
        to_device([{3}], CPU)
    assert len(told) == 2


@given(length=st.integers(0, 6), wrap=st.lists(st.sampled_from("dlton"), max_size=4), array=st.booleans())
def test_the_length_of_a_batch_is_that_of_its_first_array(length: int, wrap: list[str], array: bool) -> None:
    data: Any = np.zeros((length, 2)) if array else torch.zeros(length, 2)
    other = torch.zeros(9)
    for kind in wrap:
        data = {
            "d": {"x": data, "y": other},
            "l": [data, other],
            "t": (data, other),
            "o": collections.UserDict(x=data, y=other),
            "n": Pair(data, other),
        }[kind]
    assert data_length(data) == length


@pytest.mark.parametrize("data", [{}, [], (), [{}], {"x": ()}])
def test_an_empty_container_has_no_length(data: Any) -> None:
    with pytest.raises(ValueError, match=r"empty container .*first value counts.*override get_batch_length"):
        data_length(data)


@pytest.mark.parametrize("data", [torch.tensor(3), np.array(3), [torch.tensor(3)]])
def test_an_array_without_dimensions_has_no_length(data: Any) -> None:
    with pytest.raises(ValueError, match=r"3.*has no dimensions.*override get_batch_length"):
        data_length(data)


@pytest.mark.parametrize("data", ["text", 3, None, object(), {1}, ["text"], {"x": 3.5}])
def test_the_length_of_another_type_is_a_type_error_with_the_remedy(data: Any) -> None:
    with pytest.raises(TypeError, match=r"of type \w+; the number of samples.*override get_batch_length"):
        data_length(data)


def test_the_examples_of_the_documentation_hold() -> None:
    assert doctest.testmod(batch_module).failed == 0
