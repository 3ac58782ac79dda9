"""What is drawn from the experiment's generator, and in which order."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_reference import grid_of
from search_runs import created, play

from determined import errors
from determined.experiment.config import (
    AdaptiveAshaSearcher,
    Categorical,
    Const,
    Double,
    GridSearcher,
    Int,
    Log,
    RandomSearcher,
    SingleSearcher,
    Space,
)
from determined.experiment.search import Began, Create, Exited, ExitReason, Search, Shutdown

SPACE: Space = {
    "units": Int(minval=-3, maxval=3),
    "Zeta": Double(minval=-1.5, maxval=2.5),
    "inner": {"b": Log(base=2.0, minval=-3, maxval=5), "a": {"z": Categorical(vals=["x", None, [1]])}},
    "fixed": Const(val={"any": ["thing"]}),
    "empty": {},
}


def creates(searcher: Any, space: Space, seed: int) -> list[Create]:
    return [made for made in Search(searcher, space, seed).handle(Began()) if isinstance(made, Create)]


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_trials_draw_hyperparameters_by_name_then_id_then_seed(seed: int) -> None:
    random = np.random.RandomState(seed)
    for trial in creates(RandomSearcher(metric="loss", max_trials=20, max_concurrent_trials=0), SPACE, seed):
        zeta = random.uniform(-1.5, 2.5)  # capitals sort first
        z = ["x", None, [1]][random.randint(3)]
        b = 2.0 ** random.uniform(-3, 5)
        units = -3 + random.randint(0, 7)
        hparams = {"Zeta": zeta, "empty": {}, "fixed": {"any": ["thing"]}, "inner": {"a": {"z": z}, "b": b}}
        assert trial.hparams == {**hparams, "units": units}
        assert trial.request_id == str(uuid.UUID(bytes=random.bytes(16), version=4))
        assert trial.seed == random.randint(0, 2**31)


def test_draws_stay_what_they_are() -> None:
    space: Space = {"a": Int(minval=1, maxval=100), "b": Log(minval=-4, maxval=0)}
    (trial,) = creates(SingleSearcher(metric="loss"), space, 7)
    assert trial.hparams == {"a": 48, "b": pytest.approx(0.0008116266883546718, rel=1e-15)}
    assert (trial.request_id, trial.seed) == ("f629a851-4396-4b70-93d0-6cfa970335b9", 1956722279)


def test_numbers_are_of_python_types() -> None:
    (trial,) = creates(SingleSearcher(metric="loss"), SPACE, 7)
    inner = trial.hparams["inner"]
    assert [type(value) for value in (trial.seed, trial.hparams["units"], trial.hparams["Zeta"], inner["b"])] == [
        int,
        int,
        float,
        float,
    ]


def test_request_ids_are_random_uuids() -> None:
    (trial,) = creates(SingleSearcher(metric="loss"), SPACE, 7)
    assert uuid.UUID(trial.request_id).version == 4


def test_trials_do_not_share_what_they_could_change() -> None:
    first, second = creates(RandomSearcher(metric="loss", max_trials=2), SPACE, 7)
    first.hparams["fixed"]["any"].append("more")
    assert second.hparams["fixed"] == {"any": ["thing"]}


def test_widest_range_of_whole_numbers() -> None:
    space: Space = {"a": Int(minval=-(2**62), maxval=2**62 - 2)}
    (trial,) = creates(SingleSearcher(metric="loss"), space, 7)
    assert -(2**62) <= trial.hparams["a"] <= 2**62 - 2


def test_brackets_share_the_generator() -> None:
    searcher = AdaptiveAshaSearcher(metric="loss", max_trials=64, max_time=64, time_metric="batches")
    random = RandomSearcher(metric="loss", max_trials=16)
    assert creates(searcher, SPACE, 3) == creates(random, SPACE, 3)


def points(space: Space, searcher: GridSearcher | None = None) -> list[dict[str, Any]]:
    searcher = searcher or GridSearcher(metric="loss", max_concurrent_trials=0)
    return [trial.hparams for trial in creates(searcher, space, 7)]


def test_grid_is_the_product_of_its_axes_from_the_end() -> None:
    space: Space = {
        "b": Categorical(vals=["x", "y"]),
        "a": {"d": Int(minval=0, maxval=2, count=3), "c": Double(minval=0, maxval=1, count=5)},
        "e": Const(val=9),
    }
    product = itertools.product([0.0, 0.25, 0.5, 0.75, 1.0], [0, 1, 2], ["x", "y"])
    expected = [{"a": {"c": c, "d": d}, "b": b, "e": 9} for c, d, b in product]
    assert points(space) == expected[::-1]


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        (Int(minval=1, maxval=4, count=10), [1, 2, 3, 4]),
        (Int(minval=0, maxval=10, count=3), [0, 5, 10]),
        (Int(minval=0, maxval=5, count=3), [0, 3, 5]),  # 2.5
        (Int(minval=-5, maxval=0, count=3), [-5, -3, 0]),  # -2.5
        (Int(minval=0, maxval=5, count=4), [0, 2, 3, 5]),
        (Int(minval=1, maxval=4, count=1), [3]),
        (Int(minval=-4, maxval=-1, count=1), [-3]),
        (Int(minval=2**62, maxval=2**62 + 3, count=4), [2**62, 2**62 + 1, 2**62 + 2, 2**62 + 3]),
        (Double(minval=1, maxval=2, count=1), [1.5]),
        (Double(minval=1, maxval=2, count=3), [1.0, 1.5, 2.0]),
        (Log(minval=-2, maxval=0, count=3), [0.01, 0.1, 1.0]),
        (Log(base=2.0, minval=0, maxval=4, count=1), [4.0]),
    ],
    ids=str,
)
def test_values_of_an_axis(axis: Any, values: list[Any]) -> None:
    assert [point["a"] for point in points({"a": axis})] == values[::-1]


INTS = st.integers(-50, 50)
LEAVES = st.one_of(
    st.builds(Const, val=st.integers()),
    st.builds(Categorical, vals=st.lists(st.integers(), min_size=1, max_size=3)),
    st.builds(
        lambda low, width, count: Int(minval=low, maxval=low + width, count=count),
        INTS,
        INTS.map(abs).map(lambda x: x + 1),
        st.integers(1, 4),
    ),
    st.builds(
        lambda low, width, count: Double(minval=low, maxval=low + width, count=count),
        st.floats(-5, 5),
        st.floats(0.1, 5),
        st.integers(1, 3),
    ),
    st.builds(
        lambda low, width, count: Log(minval=low, maxval=low + width, count=count),
        st.floats(-5, 5),
        st.floats(0.1, 5),
        st.integers(1, 3),
    ),
)
SPACES = st.recursive(
    st.dictionaries(st.text("abc", max_size=2), LEAVES, max_size=3),
    lambda inner: st.dictionaries(st.text("abc", max_size=2), st.one_of(LEAVES, inner), max_size=3),
    max_leaves=3,
)


@given(SPACES)
def test_any_grid_is_the_product_of_its_axes(space: Space) -> None:
    product = grid_of(space)
    assert points(space) == product[::-1]


def test_point_of_an_invalid_trial_is_used_up() -> None:
    search = Search(GridSearcher(metric="loss", max_concurrent_trials=1), {"a": Categorical(vals=[1, 2])}, 7)
    (first,) = search.handle(Began())
    assert isinstance(first, Create)
    (second,) = search.handle(Exited(first.request_id, ExitReason.INVALID_HP))
    assert isinstance(second, Create)
    assert (first.hparams, second.hparams) == ({"a": 2}, {"a": 1})
    assert search.handle(Exited(second.request_id, ExitReason.COMPLETED)) == [Shutdown()]


def test_grid_without_ranges_has_one_point() -> None:
    assert points({"a": Const(val=1)}) == [{"a": 1}]


def test_huge_grid_is_never_laid_out() -> None:
    space: Space = {name: Int(minval=0, maxval=999, count=1000) for name in "abcdef"}
    searcher = GridSearcher(metric="loss", max_concurrent_trials=2)
    assert points(space, searcher) == [dict.fromkeys("abcdef", 999), {**dict.fromkeys("abcde", 999), "f": 998}]


def test_grid_counts_down_to_its_first_point() -> None:
    space: Space = {"a": Int(minval=0, maxval=2, count=3), "b": Categorical(vals=["x", "y"])}
    played = play(Search(GridSearcher(metric="loss", max_concurrent_trials=1), space, 7), [])
    assert created(played)[-1].hparams == {"a": 0, "b": "x"}
    assert len(created(played)) == 6


def test_range_without_a_count_is_refused() -> None:
    with pytest.raises(errors.InvalidExperimentException, match=r"double from 0\.0 to 1\.0 has none\. Add count"):
        points({"a": Double(minval=0, maxval=1)})
