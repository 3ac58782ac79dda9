"""ASHA: which trials climb, which are stopped, and what takes their place."""

from __future__ import annotations

import math
from typing import Any

import pytest
from search_runs import SPACE, begin, through_json

from determined import errors
from determined.experiment.config import AdaptiveAshaSearcher, AsyncHalvingSearcher
from determined.experiment.search import (
    Create,
    Exited,
    ExitReason,
    Operation,
    Rung,
    Search,
    Shutdown,
    Stop,
    Validated,
    preview,
)


def halving(**changes: Any) -> AsyncHalvingSearcher:
    """Rungs at 1, 2 and 4 of which every second trial goes on."""
    settings = {"num_rungs": 3, "max_trials": 8, "max_time": 4, "divisor": 2.0, "max_concurrent_trials": 4}
    return AsyncHalvingSearcher(metric="loss", time_metric="batches", **{**settings, **changes})


def adaptive(**changes: Any) -> AdaptiveAshaSearcher:
    settings: dict[str, Any] = {"max_trials": 500, "max_time": 16, **changes}
    return AdaptiveAshaSearcher(metric="loss", time_metric="batches", **settings)


def kinds(operations: list[Operation]) -> list[str]:
    return [type(operation).__name__ for operation in operations]


def stops(operations: list[Operation]) -> bool:
    return any(isinstance(operation, Stop) for operation in operations)


def test_first_trial_at_a_rung_goes_on() -> None:
    search, (first, *_) = begin(halving())
    assert search.handle(Validated(first, 99.0, 1)) == []


def test_validation_before_the_rung_changes_nothing() -> None:
    search, (first, second, *_) = begin(halving(max_time=8))
    search.handle(Validated(first, 1.0, 2))
    assert search.handle(Validated(second, 2.0, 1)) == []


def test_worse_one_of_two_is_stopped_and_another_begins() -> None:
    search, (first, second, *_) = begin(halving())
    search.handle(Validated(first, 1.0, 1))
    operations = search.handle(Validated(second, 2.0, 1))
    assert operations[0] == Stop(second)
    assert kinds(operations) == ["Stop", "Create"]


def test_stop_comes_even_when_there_are_enough_trials() -> None:
    search, (first, second) = begin(halving(max_trials=2))
    search.handle(Validated(first, 1.0, 1))
    assert search.handle(Validated(second, 2.0, 1)) == [Stop(second)]


def test_larger_metrics_win_if_larger_is_better() -> None:
    search, (first, second, third, _) = begin(halving(smaller_is_better=False))
    search.handle(Validated(first, 1.0, 1))
    assert search.handle(Validated(second, 2.0, 1)) == []
    assert stops(search.handle(Validated(third, 1.5, 1)))


def test_equal_metrics_are_placed_before_earlier_ones() -> None:
    search, trials = begin(halving())
    assert [stops(search.handle(Validated(trial, 1.0, 1))) for trial in trials] == [False] * 4


def test_one_validation_may_clear_several_rungs() -> None:
    search, (first, second, *_) = begin(halving())
    assert search.handle(Validated(first, 1.0, 3)) == []
    # The second one is better, so it clears both rungs; worse ones would be stopped at the first.
    assert search.handle(Validated(second, 0.5, 2)) == []
    assert not stops(search.handle(Validated(first, 1.0, 3.9)))
    assert stops(search.handle(Validated(second, 0.5, 4)))


def test_trial_is_stopped_at_the_top() -> None:
    search, (first, *_) = begin(halving())
    operations = search.handle(Validated(first, 1.0, 4))
    assert kinds(operations) == ["Stop", "Create"]


def test_stopped_at_the_first_rung_it_is_too_bad_for() -> None:
    search, (first, second, *_) = begin(halving())
    search.handle(Validated(first, 1.0, 1))
    search.handle(Validated(second, 2.0, 4))  # it never counts at the second rung
    assert search.handle(Validated(first, 9.0, 2)) == []


@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_nan_is_worst(smaller_is_better: bool) -> None:
    search, (first, second, *_) = begin(halving(smaller_is_better=smaller_is_better))
    search.handle(Validated(first, -1e300 if not smaller_is_better else 1e300, 1))
    assert stops(search.handle(Validated(second, math.nan, 1)))


def test_nan_counts_at_its_rung() -> None:
    search, (first, second, third, fourth) = begin(halving())
    search.handle(Validated(first, math.nan, 1))
    search.handle(Validated(second, 1.0, 1))
    search.handle(Validated(third, 1.5, 1))
    # Second of four, of whom two go on.
    assert search.handle(Validated(fourth, 1.2, 1)) == []


def test_validations_of_stopped_trials_are_ignored() -> None:
    search, (first, second, *_) = begin(halving())
    search.handle(Validated(first, 1.0, 1))
    search.handle(Validated(second, 2.0, 1))
    before = search.state()
    assert search.handle(Validated(second, 0.0, 4)) == []
    assert search.state() == before


def test_end_of_a_stopped_trial_creates_nothing() -> None:
    search, (first, second, *_) = begin(halving())
    search.handle(Validated(first, 1.0, 1))
    search.handle(Validated(second, 2.0, 1))
    assert search.handle(Exited(second, ExitReason.COMPLETED)) == []


def test_error_after_a_stop_counts_once_at_the_rung() -> None:
    search, (first, second, third, _) = begin(halving())
    search.handle(Validated(first, 1.0, 1))
    search.handle(Validated(second, 2.0, 1))
    assert search.handle(Exited(second, ExitReason.ERROR)) == []
    # Third of three, of whom one goes on; if the error had counted too, it would be second of four.
    assert stops(search.handle(Validated(third, 1.5, 1)))


def test_error_counts_as_the_worst_at_its_rung_and_is_replaced() -> None:
    search, (first, second, third, fourth) = begin(halving())
    assert kinds(search.handle(Exited(first, ExitReason.ERROR))) == ["Create"]
    assert search.handle(Validated(second, 2.0, 1)) == []
    assert search.handle(Validated(third, 1.0, 1)) == []
    # Second of four: the error is among them.
    assert search.handle(Validated(fourth, 1.5, 1)) == []


def test_error_counts_at_the_rung_that_the_trial_had_reached() -> None:
    search, (first, second, third, _) = begin(halving())
    search.handle(Validated(first, 1.0, 1))
    search.handle(Exited(first, ExitReason.ERROR))  # worst at the second rung, still best at the first
    assert stops(search.handle(Validated(second, 2.0, 2)))
    assert search.handle(Validated(third, 0.5, 2)) == []


def test_invalid_hyperparameters_leave_no_trace_at_any_rung() -> None:
    search, (first, second, third, _) = begin(halving())
    search.handle(Validated(first, 1.0, 2))
    assert kinds(search.handle(Exited(first, ExitReason.INVALID_HP))) == ["Create"]
    assert search.handle(Validated(second, 9.0, 2)) == []
    assert stops(search.handle(Validated(third, 10.0, 1)))


def test_invalid_hyperparameters_are_replaced_even_after_a_stop() -> None:
    search, (first, second) = begin(halving(max_trials=2))
    search.handle(Validated(first, 1.0, 1))
    search.handle(Validated(second, 2.0, 1))
    assert kinds(search.handle(Exited(second, ExitReason.INVALID_HP))) == ["Create"]


def test_only_the_metrics_of_the_invalid_trial_go() -> None:
    search, (first, second, third, _) = begin(halving())
    search.handle(Validated(first, 1.0, 1))
    search.handle(Validated(second, 3.0, 1))
    search.handle(Exited(second, ExitReason.INVALID_HP))
    assert stops(search.handle(Validated(third, 2.0, 1)))


@pytest.mark.parametrize("reason", [ExitReason.COMPLETED, ExitReason.CANCELED])
def test_trial_that_ends_below_the_top_is_replaced(reason: ExitReason) -> None:
    search, (first, *_) = begin(halving())
    assert kinds(search.handle(Exited(first, reason))) == ["Create"]


def test_trial_that_ends_below_the_top_is_not_replaced_beyond_max_trials() -> None:
    search, (first, second) = begin(halving(max_trials=2))
    assert search.handle(Exited(first, ExitReason.COMPLETED)) == []
    assert search.handle(Exited(second, ExitReason.COMPLETED)) == [Shutdown()]


@pytest.mark.parametrize(
    ("changes", "initial"),
    [
        ({"max_concurrent_trials": 3}, 3),
        ({"max_concurrent_trials": 30}, 8),
        ({"max_concurrent_trials": 0}, 4),
        ({"max_concurrent_trials": 0, "max_trials": 3}, 3),
        ({"max_concurrent_trials": 0, "num_rungs": 1}, 1),
        ({"max_concurrent_trials": 0, "divisor": 2.5}, 6),
        ({"max_concurrent_trials": 0, "divisor": 2e9, "num_rungs": 20}, 8),
    ],
)
def test_trials_at_the_start(changes: dict[str, Any], initial: int) -> None:
    _, trials = begin(halving(**changes))
    assert len(trials) == initial


def test_restart_may_repeat_validations() -> None:
    search, (first, *_) = begin(halving())
    search.handle(Validated(first, 1.0, 1))
    search.handle(Validated(first, 1.0, 2))
    before = through_json(search.state())["method"]
    assert search.handle(Validated(first, 1.0, 1)) == []
    assert search.state()["method"] == before


@pytest.mark.parametrize("time", [None, math.nan, math.inf])
def test_validation_without_the_time_metric_is_refused(time: float | None) -> None:
    search, (first, *_) = begin(halving())
    with pytest.raises(errors.InvalidExperimentException, match=r"'batches'.*searcher\.time_metric.*Report 'batches'"):
        search.handle(Validated(first, 1.0, time))


def test_stopped_trial_needs_no_time_metric() -> None:
    search, (first, *_) = begin(halving())
    search.handle(Validated(first, 1.0, 4))
    assert search.handle(Validated(first, 1.0, None)) == []


def test_progress_counts_results_of_the_lowest_rung() -> None:
    search, (first, second, *_) = begin(halving())
    search.handle(Validated(first, 1.0, 1))
    search.handle(Validated(second, 2.0, 1))
    assert search.progress({first: 0.5}) == 2 / (1.2 * 8)


def test_progress_counts_trials_that_ended_if_those_are_more() -> None:
    search, (first, *_) = begin(halving())
    search.handle(Exited(first, ExitReason.CANCELED))
    assert search.progress({}) == 1 / 8


def test_progress_does_not_count_invalid_trials() -> None:
    search, (first, *_) = begin(halving())
    search.handle(Validated(first, 1.0, 1))
    search.handle(Exited(first, ExitReason.INVALID_HP))
    assert search.progress({}) == 0


def shape(searcher: AdaptiveAshaSearcher) -> list[tuple[int, list[int]]]:
    """(trials, units) of each bracket."""
    rows = preview(searcher, SPACE, 7).rows
    brackets = sorted({row.bracket for row in rows if row.bracket is not None})
    return [
        (
            next(row.arrive or 0 for row in rows if (row.bracket, row.rung) == (bracket, 0)),
            [row.time or 0 for row in rows if row.bracket == bracket],
        )
        for bracket in brackets
    ]


def test_worked_example() -> None:
    assert shape(adaptive()) == [(364, [1, 4, 16]), (136, [4, 16])]


def at_start(searcher: AdaptiveAshaSearcher) -> list[int]:
    """How many trials each bracket starts: the brackets of a search that has begun tell by whom they know."""
    search, trials = begin(searcher)
    brackets = search.state()["method"]
    counts = [len(bracket["climbed"]) for bracket in brackets]
    assert sum(counts) == len(trials)
    return counts


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, [8, 8]),
        ({"max_concurrent_trials": 17}, [9, 8]),
        ({"max_concurrent_trials": 1}, [1, 1]),
        ({"max_concurrent_trials": 0}, [136, 136]),
        ({"max_concurrent_trials": 0, "max_trials": 16}, [4, 4]),
        ({"max_concurrent_trials": 8, "mode": "conservative"}, [3, 3, 2]),
    ],
)
def test_concurrency_is_shared_by_the_brackets(changes: dict[str, Any], counts: list[int]) -> None:
    assert at_start(adaptive(**changes)) == counts


@pytest.mark.parametrize(
    ("changes", "brackets"),
    [
        ({"mode": "aggressive"}, [(500, [1, 4, 16])]),
        ({"mode": "conservative"}, [(320, [1, 4, 16]), (120, [4, 16]), (60, [16])]),
        ({"bracket_rungs": [1, 3]}, [(422, [1, 4, 16]), (78, [16])]),
        ({"bracket_rungs": [5]}, [(500, [1, 1, 1, 4, 16])]),
        ({"max_rungs": 2}, [(334, [4, 16]), (166, [16])]),
        ({"max_trials": 1}, [(1, [16])]),
        ({"max_time": 1}, [(500, [1])]),
        # More brackets than trials: one trial each.
        ({"max_trials": 1, "bracket_rungs": [1, 2]}, [(1, [4, 16]), (1, [16])]),
        # The quotient of the logarithms is 2.9999999999999996.
        ({"max_trials": 1000, "max_time": 1000, "divisor": 10.0}, [(870, [10, 100, 1000]), (130, [100, 1000])]),
    ],
)
def test_brackets(changes: dict[str, Any], brackets: list[tuple[int, list[int]]]) -> None:
    assert shape(adaptive(**changes)) == brackets


def test_every_bracket_stops_by_its_own_rungs() -> None:
    search, trials = begin(adaptive())
    of_first, of_second = trials[:2], trials[8:10]
    assert [stops(search.handle(Validated(trial, 1.0 + i, 1))) for i, trial in enumerate(of_first)] == [False, True]
    assert [stops(search.handle(Validated(trial, 1.0 + i, 1))) for i, trial in enumerate(of_second)] == [False, False]
    assert [stops(search.handle(Validated(trial, 1.0 + i, 4))) for i, trial in enumerate(of_second)] == [False, True]


def test_replacement_belongs_to_the_bracket_of_the_one_it_replaces() -> None:
    search, trials = begin(adaptive(max_concurrent_trials=2))
    (made,) = search.handle(Exited(trials[1], ExitReason.COMPLETED))
    assert isinstance(made, Create)
    assert made.request_id in search.state()["method"][1]["climbed"]


def test_progress_is_the_mean_over_the_brackets() -> None:
    search, trials = begin(adaptive())
    search.handle(Validated(trials[0], 1.0, 1))
    search.handle(Validated(trials[8], 1.0, 4))
    assert search.progress({}) == pytest.approx((1 / (1.2 * 364) + 1 / (1.2 * 136)) / 2)


def test_rungs_tell_who_arrived_and_who_is_on_the_way() -> None:
    search, (first, second, third, fourth) = begin(halving())
    search.handle(Validated(first, 1.0, 2))
    made = search.handle(Validated(second, 2.0, 1))[-1]  # the second one is stopped
    assert isinstance(made, Create)
    assert search.rungs() == (
        Rung(0, 0, 1, 2, (third, fourth, made.request_id)),
        Rung(0, 1, 2, 1, ()),
        Rung(0, 2, 4, 0, (first,)),
    )


def test_rungs_of_every_bracket() -> None:
    search, _ = begin(adaptive())
    places = [(rung.bracket, rung.number, rung.time) for rung in search.rungs()]
    assert places == [(0, 0, 1), (0, 1, 4), (0, 2, 16), (1, 0, 4), (1, 1, 16)]


def test_state_holds_metrics_to_the_last_bit() -> None:
    searcher = halving()
    search, (first, second, *_) = begin(searcher)
    metric = math.nextafter(1.0, 2.0)
    search.handle(Validated(first, metric, 1))
    again = Search.restore(searcher, SPACE, 7, through_json(search.state()))
    assert again.handle(Validated(second, metric, 1)) == []


def test_state_holds_infinities_as_json() -> None:
    searcher = halving()
    search, (first, second, third, _) = begin(searcher)
    search.handle(Validated(first, math.inf, 1))
    search.handle(Validated(second, math.nan, 1))
    search.handle(Exited(third, ExitReason.ERROR))
    again = Search.restore(searcher, SPACE, 7, through_json(search.state()))
    assert again.state() == search.state()
