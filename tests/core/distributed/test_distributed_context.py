"""core.DistributedContext in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from determined import core

ONE = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "cross_rank": 0, "cross_size": 1}


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


@pytest.fixture
def alone() -> core.DistributedContext:
    return core.DistributedContext(**ONE)


@pytest.mark.parametrize(("name", "value"), ONE.items())
def test_attributes_are_what_was_given(name: str, value: int, alone: core.DistributedContext) -> None:
    assert getattr(alone, name) == value


def test_getters(alone: core.DistributedContext) -> None:
    assert (alone.get_rank(), alone.get_local_rank(), alone.get_size(), alone.get_num_agents()) == (0, 0, 1, 1)


def test_the_only_process_is_the_chief(alone: core.DistributedContext) -> None:
    assert alone.is_chief


@pytest.mark.parametrize("call", ["gather", "gather_local", "allgather", "allgather_local"])
def test_gathering_gives_the_one_item(call: str, alone: core.DistributedContext) -> None:
    item = Unpicklable()
    (gathered,) = getattr(alone, call)(item)
    assert gathered is item


@pytest.mark.parametrize("call", ["broadcast", "broadcast_local"])
def test_broadcasting_gives_the_item(call: str, alone: core.DistributedContext) -> None:
    item = Unpicklable()
    assert getattr(alone, call)(item) is item


def test_closing_twice_is_fine(alone: core.DistributedContext) -> None:
    alone.close()
    alone.close()


def test_network_arguments_are_accepted() -> None:
    core.DistributedContext(**ONE, chief_ip="10.0.0.1", pub_port=1, pull_port=2, port_offset=3, force_tcp=True)


@pytest.mark.parametrize("kind", ["", "local_", "cross_"])
@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 1), (0, 0), (0, -1)])
def test_rank_out_of_range_is_refused(kind: str, rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"{kind}rank={rank}, {kind}size={size}"):
        core.DistributedContext(**ONE | {f"{kind}rank": rank, f"{kind}size": size})


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("value", ["0", 1.0, None, True])
def test_numbers_of_another_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}={value!r}"):
        core.DistributedContext(**ONE | {name: value})


@pytest.mark.parametrize("name", ["local_size", "cross_size"])
def test_more_neighbours_than_processes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=2"):
        core.DistributedContext(**ONE | {name: 2})


@pytest.mark.parametrize("numbers", [{"size": 2}, {"size": 2, "rank": 1, "local_size": 2}])
def test_numbers_that_do_not_fit_one_machine_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="on one machine, local_size is size and local_rank is rank"):
        core.DistributedContext(**ONE | numbers)


class Horovod:
    """Answers as an initialized `horovod.torch` does."""

    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return self._size - 1

    def size(self) -> int:
        return self._size

    local_rank, local_size = rank, size

    def cross_rank(self) -> int:
        return 0

    def cross_size(self) -> int:
        return 1


def test_horovod_of_one_process() -> None:
    context = core.DistributedContext.from_horovod(Horovod(1), chief_ip="127.0.0.1")
    assert (context.rank, context.size, context.local_size, context.cross_size) == (0, 1, 1, 1)


MAKERS = [core.DistributedContext.from_torch_distributed, core.DistributedContext.from_deepspeed]


@pytest.mark.parametrize("make", MAKERS)
def test_missing_process_group_is_named(make: Any) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        make()


@pytest.fixture
def process_group() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("process_group")
def test_process_group_of_one_process(make: Any) -> None:
    context = make(chief_ip="127.0.0.1")
    assert (context.rank, context.size, context.local_rank, context.cross_size) == (0, 1, 0, 1)


@pytest.mark.usefixtures("process_group")
def test_closing_leaves_the_process_group_alone() -> None:
    import torch.distributed as dist

    core.DistributedContext.from_torch_distributed().close()
    assert dist.is_initialized()
