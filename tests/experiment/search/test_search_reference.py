"""For any list of events, the operations are those of the plainest implementation."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from search_reference import REFERENCES
from search_runs import ACTS, ADAPTIVES, GRIDS, HALVINGS, RANDOMS, SEEDS, SINGLES, SPACE, Act, play

from determined.experiment.search import Search

often = settings(max_examples=200, deadline=None)
sometimes = settings(max_examples=40, deadline=None)


def agrees(searcher: Any, seed: int, acts: list[Act]) -> None:
    played = play(Search(searcher, SPACE, seed), acts)
    reference = REFERENCES[searcher.name](searcher, SPACE, seed)
    for event, operations in played:
        assert operations == reference.handle(event), event


@sometimes
@given(SINGLES, SEEDS, ACTS)
def test_single(searcher: Any, seed: int, acts: list[Act]) -> None:
    agrees(searcher, seed, acts)


@sometimes
@given(RANDOMS, SEEDS, ACTS)
def test_random(searcher: Any, seed: int, acts: list[Act]) -> None:
    agrees(searcher, seed, acts)


@sometimes
@given(GRIDS, SEEDS, ACTS)
def test_grid(searcher: Any, seed: int, acts: list[Act]) -> None:
    agrees(searcher, seed, acts)


@often
@given(HALVINGS, SEEDS, ACTS)
def test_async_halving(searcher: Any, seed: int, acts: list[Act]) -> None:
    agrees(searcher, seed, acts)


@often
@given(ADAPTIVES, SEEDS, ACTS)
def test_adaptive_asha(searcher: Any, seed: int, acts: list[Act]) -> None:
    agrees(searcher, seed, acts)
