"""Where the trials of a rung-based search stand."""

from __future__ import annotations

from determined.experiment.config import AsyncHalvingSearcher, RandomSearcher
from determined.experiment.search import Began, Create, Exited, ExitReason, Search, Validated


def halving() -> tuple[Search, list[str]]:
    """Return a search with rungs at 1, 2 and 4, and its first two trials."""
    searcher = AsyncHalvingSearcher(
        metric="loss", num_rungs=3, max_trials=4, time_metric="epochs", max_time=4, divisor=2, max_concurrent_trials=2
    )
    search = Search(searcher, {}, 0)
    return search, [made.request_id for made in search.handle(Began()) if isinstance(made, Create)]


def arrived(search: Search) -> list[int]:
    return [rung.arrived for rung in search.rungs()]


def test_rungs_have_their_times_and_the_trials_on_their_way() -> None:
    search, (first, second) = halving()
    assert [(rung.bracket, rung.number, rung.time) for rung in search.rungs()] == [(0, 0, 1), (0, 1, 2), (0, 2, 4)]
    assert search.rungs()[0].climbing == (first, second)


def test_a_trial_that_is_good_enough_is_on_its_way_to_the_next_rung() -> None:
    search, (first, second) = halving()
    search.handle(Validated(first, 0.5, 1))
    assert arrived(search) == [1, 0, 0]
    assert [rung.climbing for rung in search.rungs()] == [(second,), (first,), ()]


def test_a_trial_at_the_top_has_arrived_everywhere() -> None:
    search, (first, _) = halving()
    search.handle(Validated(first, 0.5, 4))
    assert arrived(search) == [1, 1, 1]


def test_a_trial_that_ended_is_on_its_way_no_more() -> None:
    search, (first, second) = halving()
    search.handle(Exited(first, ExitReason.COMPLETED))
    climbing = [request_id for rung in search.rungs() for request_id in rung.climbing]
    assert first not in climbing
    assert second in climbing


def test_other_searches_have_no_rungs() -> None:
    search = Search(RandomSearcher(metric="loss", max_trials=2), {}, 0)
    search.handle(Began())
    assert search.rungs() == ()
