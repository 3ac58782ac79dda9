"""Which checkpoints retention gives up, against a plain reading of the rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined import errors
from determined.storage import Candidate, Retention, expired

# Few values, so that ties are frequent.
SCORES = st.none() | st.sampled_from([0.0, 1.0, 2.0, 3.0, math.nan, math.inf, -math.inf])
RETENTIONS = st.builds(
    Retention,
    save_experiment_best=st.integers(0, 3),
    save_trial_best=st.integers(0, 3),
    save_trial_latest=st.integers(0, 3),
)


@st.composite
def candidate_lists(draw: st.DrawFn) -> list[Candidate]:
    places = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), unique=True, max_size=12))
    return [
        Candidate(uuid=f"c{number}", trial_id=trial, steps_completed=steps, score=draw(SCORES))
        for number, (trial, steps) in enumerate(places)
    ]


def worth(one: Candidate) -> tuple[float, int, str]:
    """Sort the better first: by a finite score, then the later one."""
    assert one.score is not None
    return (one.score if math.isfinite(one.score) else math.inf, -one.steps_completed, one.uuid)


def rank(one: Candidate, others: list[Candidate]) -> int:
    return 1 + sum(worth(other) < worth(one) for other in others if other.score is not None)


def is_garbage(one: Candidate, every: list[Candidate], keep: Retention) -> bool:
    """The rule, word for word."""
    own = [other for other in every if other.trial_id == one.trial_id]
    is_ranked_out = one.score is None or (
        rank(one, every) > keep.save_experiment_best and rank(one, own) > keep.save_trial_best
    )
    recency = 1 + sum(other.steps_completed > one.steps_completed for other in own)
    return is_ranked_out and recency > keep.save_trial_latest


@given(candidate_lists(), RETENTIONS, st.sets(st.sampled_from([f"c{number}" for number in range(12)])))
def test_what_goes_is_what_the_rule_says(every: list[Candidate], keep: Retention, protected: set[str]) -> None:
    expected = [one.uuid for one in every if is_garbage(one, every, keep) and one.uuid not in protected]
    assert expired(every, keep, protected) == expected


@given(candidate_lists(), RETENTIONS)
def test_what_stayed_once_stays_the_next_time(every: list[Candidate], keep: Retention) -> None:
    gone = expired(every, keep)
    assert expired([one for one in every if one.uuid not in gone], keep) == []


@given(candidate_lists(), RETENTIONS)
def test_order_of_the_candidates_does_not_matter(every: list[Candidate], keep: Retention) -> None:
    assert set(expired(every[::-1], keep)) == set(expired(every, keep))


def test_nothing_goes_of_nothing() -> None:
    assert expired([], Retention()) == []


@pytest.mark.parametrize("section", [{}, {"type": "shared_fs"}, {"save_trial_best": None}])
def test_section_that_says_nothing_of_retention_keeps_all(section: dict[str, Any]) -> None:
    assert Retention.of_section(section) is None


def test_section_with_one_number_has_the_defaults_for_the_others() -> None:
    section = {"save_experiment_best": 2, "save_trial_latest": None}
    assert Retention.of_section(section) == Retention(save_experiment_best=2, save_trial_best=1, save_trial_latest=1)


@pytest.mark.parametrize("value", [-1, 1.0, "1", True, [1]])
@pytest.mark.parametrize("name", ["save_experiment_best", "save_trial_best", "save_trial_latest"])
def test_number_that_is_none_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(errors.StorageException, match=rf"checkpoint_storage\.{name}=.*an int >= 0"):
        Retention.of_section({name: value})


def test_the_work_grows_with_the_checkpoints_not_with_their_square() -> None:
    read = 0

    class Counting(int):
        """A trial id that counts how often it is compared or looked up."""

        def __eq__(self, other: object) -> bool:
            nonlocal read
            read += 1
            return int(self) == other

        def __hash__(self) -> int:
            nonlocal read
            read += 1
            return hash(int(self))

    count = 300
    candidates = [
        Candidate(uuid=f"c{number}", trial_id=Counting(number), steps_completed=1, score=None)
        for number in range(count)
    ]
    assert expired(candidates, Retention(save_trial_latest=1)) == []
    assert read < 20 * count
