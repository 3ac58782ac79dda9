"""What holds for every search, whatever happens to its trials."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_runs import (
    ACTS,
    ADAPTIVES,
    HALVINGS,
    METRICS,
    SEARCHERS,
    SEEDS,
    SPACE,
    Act,
    Play,
    begin,
    created,
    ends,
    play,
    through_json,
)

from determined import errors
from determined.experiment.config import GridSearcher, RandomSearcher, SingleSearcher
from determined.experiment.search import (
    Began,
    Create,
    Event,
    Exited,
    ExitReason,
    Search,
    Shutdown,
    Stop,
    Validated,
)

checked = settings(max_examples=60, deadline=None)
slowly_checked = settings(max_examples=25, deadline=None)
thoroughly_checked = settings(max_examples=200, deadline=None)


def restored(search: Search, searcher: Any, seed: int) -> Search:
    return Search.restore(searcher, SPACE, seed, through_json(search.state()))


@checked
@given(SEARCHERS, SEEDS, ACTS)
def test_same_seed_and_events_give_the_same_operations(searcher: Any, seed: int, acts: list[Act]) -> None:
    assert play(Search(searcher, SPACE, seed), acts) == play(Search(searcher, SPACE, seed), acts)


@slowly_checked
@given(SEARCHERS, SEEDS, ACTS)
def test_going_through_json_after_every_event_changes_nothing(searcher: Any, seed: int, acts: list[Act]) -> None:
    undisturbed = play(Search(searcher, SPACE, seed), acts)
    disturbed = play(Search(searcher, SPACE, seed), acts, between=lambda search: restored(search, searcher, seed))
    # As texts, since NaN is not equal to itself.
    assert str(disturbed) == str(undisturbed)


@slowly_checked
@given(SEARCHERS, SEEDS, ACTS, st.integers(0, 100))
def test_old_state_and_the_events_since_give_the_present_state(
    searcher: Any, seed: int, acts: list[Act], place: int
) -> None:
    played = play(Search(searcher, SPACE, seed), acts)
    place %= len(played)
    search = Search(searcher, SPACE, seed)
    for event, _ in played[:place]:
        search.handle(event)
    search = restored(search, searcher, seed)
    for event, operations in played[place:]:
        assert search.handle(Event.from_json(through_json(event.to_json()))) == operations


@slowly_checked
@given(SEARCHERS, SEEDS, ACTS)
def test_state_that_is_restored_is_the_same_again(searcher: Any, seed: int, acts: list[Act]) -> None:
    def check(search: Search) -> Search:
        again = restored(search, searcher, seed)
        assert again.state() == search.state()
        return search

    play(Search(searcher, SPACE, seed), acts[:20], between=check)


@checked
@given(SEARCHERS, SEEDS, ACTS)
def test_search_ends_once_and_when_its_last_trial_has_ended(searcher: Any, seed: int, acts: list[Act]) -> None:
    played = play(Search(searcher, SPACE, seed), acts)
    under_way: set[str] = set()
    for event, operations in played:
        if isinstance(event, Exited):
            under_way.discard(event.request_id)
        under_way |= {operation.request_id for operation in operations if isinstance(operation, Create)}
        assert not (under_way and any(isinstance(operation, Shutdown) for operation in operations))
    assert not under_way
    assert len(ends(played)) == 1


@checked
@given(SEARCHERS, SEEDS, ACTS)
def test_search_ends_as_its_trials_did(searcher: Any, seed: int, acts: list[Act]) -> None:
    played = play(Search(searcher, SPACE, seed), acts)
    reasons: dict[str, ExitReason] = {}
    for event, _ in played:
        if isinstance(event, Exited):
            reasons.setdefault(event.request_id, event.reason)
    bad = {ExitReason.ERROR, ExitReason.INVALID_HP}
    (end,) = ends(played)
    assert end.failed == (set(reasons.values()) <= bad)
    assert end.canceled == (set(reasons.values()) == {ExitReason.CANCELED})


@checked
@given(SEARCHERS, SEEDS, ACTS)
def test_request_ids_are_unique(searcher: Any, seed: int, acts: list[Act]) -> None:
    trials = created(play(Search(searcher, SPACE, seed), acts))
    assert len({trial.request_id for trial in trials}) == len(trials)


def invalid_trials(played: Play) -> int:
    reasons: dict[str, ExitReason] = {}
    for event, _ in played:
        if isinstance(event, Exited):
            reasons.setdefault(event.request_id, event.reason)
    return sum(reason is ExitReason.INVALID_HP for reason in reasons.values())


@checked
@given(st.one_of(HALVINGS, ADAPTIVES, SEARCHERS), SEEDS, ACTS)
def test_search_has_the_configured_number_of_trials(searcher: Any, seed: int, acts: list[Act]) -> None:
    played = play(Search(searcher, SPACE, seed), acts)
    replaced = invalid_trials(played)
    if isinstance(searcher, SingleSearcher):
        most = 1
    elif isinstance(searcher, GridSearcher):
        most = 3 * 2 * 2 * 2
    else:
        # Every bracket has a trial, even if there are more brackets than trials.
        most = max(searcher.max_trials, len(getattr(searcher, "bracket_rungs", ()))) + replaced
    # All trials end by themselves at last, so each one's place was taken until there were enough.
    assert len(created(played)) == most


@checked
@given(SEARCHERS, SEEDS, ACTS)
def test_no_more_trials_run_at_once_than_allowed(searcher: Any, seed: int, acts: list[Act]) -> None:
    limit = getattr(searcher, "max_concurrent_trials", 0)
    running: set[str] = set()
    stopped: set[str] = set()
    extra = 0
    for event, operations in play(Search(searcher, SPACE, seed), acts):
        if isinstance(event, Exited):
            # A trial that was stopped has been replaced; if it then turns out to be invalid, it is replaced again.
            extra += event.request_id in stopped and event.reason is ExitReason.INVALID_HP
            running.discard(event.request_id)
            stopped.discard(event.request_id)
        for operation in operations:
            if isinstance(operation, Stop):
                running.discard(operation.request_id)
                stopped.add(operation.request_id)
            elif isinstance(operation, Create):
                running.add(operation.request_id)
        brackets = len(getattr(searcher, "bracket_rungs", ())) or 4
        least = brackets if searcher.name == "adaptive_asha" else 0
        assert not limit or len(running) <= max(limit, least) + extra


@thoroughly_checked
@given(HALVINGS, SEEDS, ACTS)
def test_every_stop_is_justified_by_the_order_of_a_rung(searcher: Any, seed: int, acts: list[Act]) -> None:
    units = [max(math.floor(searcher.max_time / searcher.divisor**i), 1) for i in reversed(range(searcher.num_rungs))]
    rungs: list[dict[str, float]] = [{} for _ in units]
    stopped: set[str] = set()
    closed: set[str] = set()

    def loses(request_id: str, metric: float, time: float) -> bool:
        """Climb as far as the time allows; say whether a rung holds too many better ones, or is the last."""
        for rung, unit in zip(rungs, units, strict=True):
            if request_id in rung:
                continue
            if time < unit:
                return False
            rung[request_id] = metric
            better = sum(other < metric for other in rung.values())
            if rung is rungs[-1] or better >= max(math.floor(len(rung) / searcher.divisor), 1):
                return True
        return False

    def close(request_id: str, reason: ExitReason) -> None:
        closed.add(request_id)
        if reason is ExitReason.INVALID_HP:
            for rung in rungs:
                rung.pop(request_id, None)
        elif reason is ExitReason.ERROR and request_id not in stopped:
            next(rung for rung in rungs if request_id not in rung)[request_id] = math.inf

    for event, operations in play(Search(searcher, SPACE, seed), acts):
        stops = {operation.request_id for operation in operations if isinstance(operation, Stop)}
        if isinstance(event, Exited) and event.request_id not in closed:
            close(event.request_id, event.reason)
        if isinstance(event, Validated) and event.request_id not in closed | stopped:
            metric = event.metric if searcher.smaller_is_better else -event.metric
            assert event.time is not None
            justified = loses(event.request_id, math.inf if math.isnan(metric) else metric, event.time)
            assert stops == ({event.request_id} if justified else set())
        else:
            assert not stops
        stopped |= stops


@checked
@given(SEARCHERS, SEEDS, ACTS)
def test_progress_is_a_fraction_that_ends_at_one(searcher: Any, seed: int, acts: list[Act]) -> None:
    seen: list[float] = []

    def look(search: Search) -> Search:
        seen.append(search.progress({}))
        return search

    play(Search(searcher, SPACE, seed), acts, between=look)
    assert all(0 <= progress <= 1 for progress in seen)
    assert seen[-1] == 1


@given(st.builds(Validated, st.just("id"), METRICS, st.one_of(st.none(), METRICS)))
def test_validation_goes_through_json(event: Validated) -> None:
    assert str(Event.from_json(through_json(event.to_json()))) == str(event)


@pytest.mark.parametrize("event", [Began(), *(Exited("id", reason) for reason in ExitReason)], ids=str)
def test_event_goes_through_json(event: Event) -> None:
    assert Event.from_json(through_json(event.to_json())) == event


def random_searcher(**changes: Any) -> RandomSearcher:
    return RandomSearcher(**{"metric": "loss", "max_trials": 4, "max_concurrent_trials": 2, **changes})


def test_events_of_trials_that_ended_are_ignored() -> None:
    search, (first, _) = begin(random_searcher())
    search.handle(Exited(first, ExitReason.COMPLETED))
    before = search.state()
    assert search.handle(Exited(first, ExitReason.ERROR)) == []
    assert search.handle(Validated(first, 0.5)) == []
    assert search.state() == before


def test_events_after_the_end_are_ignored() -> None:
    search, (only,) = begin(SingleSearcher(metric="loss"))
    assert not search.has_ended
    assert search.handle(Exited(only, ExitReason.COMPLETED)) == [Shutdown()]
    assert search.has_ended
    assert search.rungs() == ()
    assert search.handle(Validated(only, 0.5)) == []
    assert search.handle(Exited(only, ExitReason.ERROR)) == []


def test_search_begins_once() -> None:
    search, _ = begin(SingleSearcher(metric="loss"))
    with pytest.raises(errors.InternalException, match="begins once"):
        search.handle(Began())


def test_state_of_another_searcher_is_refused() -> None:
    search, _ = begin(SingleSearcher(metric="loss"))
    with pytest.raises(errors.InternalException, match="'single' cannot continue as 'random'"):
        Search.restore(random_searcher(), SPACE, 7, search.state())


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(TypeError, match="handle\\('began'\\)"):
        Search(random_searcher(), SPACE, 7).handle("began")  # type: ignore[arg-type]


def test_failed_trials_count_and_invalid_ones_do_not() -> None:
    search, trials = begin(random_searcher())
    for reason in [ExitReason.ERROR, ExitReason.INVALID_HP, ExitReason.CANCELED]:
        (made,) = search.handle(Exited(trials.pop(0), reason))
        assert isinstance(made, Create)
        trials.append(made.request_id)
    assert [search.handle(Exited(trial, ExitReason.COMPLETED)) for trial in trials] == [[], [Shutdown()]]


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        (ExitReason.COMPLETED, Shutdown()),
        (ExitReason.ERROR, Shutdown(failed=True)),
        (ExitReason.INVALID_HP, Shutdown(failed=True)),
        (ExitReason.CANCELED, Shutdown(canceled=True)),
    ],
)
def test_single_trial_is_never_replaced(reason: ExitReason, end: Shutdown) -> None:
    search, (only,) = begin(SingleSearcher(metric="loss"))
    assert search.handle(Exited(only, reason)) == [end]


def test_progress_is_the_mean_over_all_trials_that_will_be() -> None:
    search, (first, second) = begin(random_searcher())
    search.handle(Exited(first, ExitReason.COMPLETED))
    assert search.progress({second: 0.5}) == (1 + 0.5) / 4


def test_trials_that_are_replaced_add_to_those_that_will_be() -> None:
    search, (first, _) = begin(random_searcher())
    search.handle(Exited(first, ExitReason.INVALID_HP))
    assert search.progress({}) == 1 / 5


@pytest.mark.parametrize(("fraction", "counted"), [(-1, 0), (7, 1), (math.nan, 0)])
def test_strange_fractions_are_brought_into_range(fraction: float, counted: float) -> None:
    search, (first, _) = begin(random_searcher())
    assert search.progress({first: fraction, "unknown": 1.0}) == counted / 4
