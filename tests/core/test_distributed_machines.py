"""core.DistributedContext between machines: network namespaces that are joined by a cable."""

from __future__ import annotations

import re
from typing import Any

import pytest
from core_ranks import Rank, Ranks, numbers

from hosts import Hosts

pytestmark = pytest.mark.usefixtures("meeting_folder")

PROGRAM = """
say(context.allgather(rank), context.allgather_local(rank))
line = context.side_line()
line.start(lambda sender, message: say("message", message), lambda lost, why: say("lost", lost), silence=2.5)
context.allgather(rank)
say("ready")
hear()
say(outcome(context.allgather, rank))
"""


@pytest.fixture
def job(hosts: Hosts, ranks: Ranks) -> list[Rank]:
    """Two ranks on each host, which wait after their first collectives."""
    options: dict[str, Any] = {"chief_ip": "10.77.0.1", "timeout": 4}
    started = []
    for rank in range(4):
        arguments = {**numbers(rank, 4, machines=2), **options}
        prefix = ["ip", "netns", "exec", hosts.names[rank // 2]]
        started += ranks.start(PROGRAM, arguments, prefix=prefix, DET_DISTRIBUTED_KEY="secret")
    return started


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
    assert all("ranks 2, 3 did not come within 4 s" in each for each in told[:2])
    # The kernel may tell that there is no way to the chief, before the timeout.
    assert all(
        re.search("rank 0(, or a rank that it waits for, did not come within 4 s| is gone)", each) for each in told[2:]
    )
