"""core.DistributedContext between machines: network namespaces that are joined by a cable."""

from __future__ import annotations

import re
from typing import Any

import pytest
from core_ranks import Rank, Ranks, numbers

from hosts import Hosts

PROGRAM = """
say(context.allgather(rank), context.allgather_local(rank))
class Listener:
    def on_left(self, rank, why):
        say("lost", rank)
context.exchange.listen(Listener(), 2.5)
context.allgather(rank)
say("ready")
hear()
say(outcome(context.allgather, rank))
"""


@pytest.fixture
def job(hosts: Hosts, ranks: Ranks) -> list[Rank]:
    """Two ranks on each host, which wait after their first collectives."""
    options: dict[str, Any] = {"chief_ip": "10.77.0.1", "timeout": 4}
    arguments = [{**numbers(rank, 4, machines=2), **options} for rank in range(4)]
    prefixes = [["ip", "netns", "exec", hosts.names[rank // 2]] for rank in range(4)]
    # These addresses have no reverse DNS entry, of which torch warns.
    variables = {"DET_DISTRIBUTED_KEY": "secret", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return ranks.start(PROGRAM, *arguments, prefixes=prefixes, **variables)


def test_two_hosts_with_two_ranks_each_exchange_objects(job: list[Rank]) -> None:
    assert [each.line() for each in job] == [f"[0, 1, 2, 3] {near}" for near in ("[0, 1]",) * 2 + ("[2, 3]",) * 2]


def test_cut_cable_is_noticed_on_both_sides(job: list[Rank], hosts: Hosts) -> None:
    for each in job:
        each.line()
        assert each.line() == "ready"
    hosts.cut()
    lost = [{each.line() for _ in range(count)} for each, count in zip(job, (2, 2, 1, 1), strict=True)]
    assert lost == [{"lost 2", "lost 3"}, {"lost 2", "lost 3"}, {"lost 0"}, {"lost 0"}]
    for each in job:
        each.tell()
    told = [each.line() for each in job]
    assert all(re.search("rank [23] is gone", each) for each in told[:2])
    assert all(re.search(r"rank 0 (could not be reached at .* within 4 s|is gone)", each) for each in told[2:])
