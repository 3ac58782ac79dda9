"""How slots are shared among experiments."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from determined.experiment.executors.local._allocator import Claimant, shares


def claimants() -> st.SearchStrategy[list[Claimant]]:
    def made(values: list[tuple[int, int, int | None]]) -> list[Claimant]:
        return [
            Claimant(number, trials * unit, unit, priority) for number, (trials, unit, priority) in enumerate(values)
        ]

    priorities = st.sampled_from([None, 1, 42, 99])
    return st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4), priorities), max_size=6).map(made)


@given(st.integers(0, 32), claimants())
def test_nobody_gets_more_than_it_wants_and_all_together_no_more_than_there_is(
    capacity: int, wanting: list[Claimant]
) -> None:
    given_out = shares(capacity, wanting)
    assert sum(given_out.values()) <= capacity
    assert all(0 <= given_out[one.experiment_id] <= one.wanted for one in wanting)
    assert all(given_out[one.experiment_id] % one.unit == 0 for one in wanting)


@given(st.integers(0, 32), claimants())
def test_no_slot_is_idle_that_somebody_could_use(capacity: int, wanting: list[Claimant]) -> None:
    given_out = shares(capacity, wanting)
    free = capacity - sum(given_out.values())
    assert not any(given_out[one.experiment_id] + one.unit <= one.wanted and one.unit <= free for one in wanting)


@given(st.integers(0, 32), st.lists(st.integers(0, 20), max_size=6))
def test_equals_differ_by_one_trial_at_most_unless_they_want_less(capacity: int, wanted: list[int]) -> None:
    given_out = shares(capacity, [Claimant(number, one) for number, one in enumerate(wanted)])
    unmet = [given_out[number] for number, one in enumerate(wanted) if given_out[number] < one]
    most = max(given_out.values(), default=0)
    assert all(most - one <= 1 for one in unmet)


@given(st.integers(0, 32), claimants())
def test_a_better_priority_gets_what_it_would_without_the_others(capacity: int, wanting: list[Claimant]) -> None:
    first = [one for one in wanting if one.priority == 1]
    alone = shares(capacity, first)
    assert {id: given for id, given in shares(capacity, wanting).items() if id in alone} == alone


def test_elastic_trials_use_what_others_leave() -> None:
    elastic = Claimant(1, 8, unit=2, is_elastic=True)
    assert shares(5, [elastic]) == {1: 5}
    assert shares(5, [elastic, Claimant(2, 2)]) == {1: 4, 2: 1}
    assert shares(1, [elastic]) == {1: 0}
    assert shares(9, [elastic, Claimant(2, 4, unit=4)]) == {1: 5, 2: 4}
    assert shares(16, [elastic, Claimant(2, 20, unit=3, is_elastic=True)]) == {1: 7, 2: 9}


def test_the_order_in_which_claims_are_read_does_not_matter() -> None:
    wanting = [Claimant(1, 4), Claimant(2, 4), Claimant(3, 1)]
    assert shares(5, wanting) == shares(5, wanting[::-1]) == {1: 2, 2: 2, 3: 1}
