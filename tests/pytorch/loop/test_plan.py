"""Units and the plan, against brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined.pytorch import Batch, Epoch, TrainUnit, _TrainBoundary, _TrainBoundaryType
from determined.pytorch._loop.plan import Plan
from determined.pytorch._loop.progress import Epochs, Progress

REPORT, VALIDATE, CHECKPOINT = _TrainBoundaryType.REPORT, _TrainBoundaryType.VALIDATE, _TrainBoundaryType.CHECKPOINT


class Odd:
    """A bare container: it can say what is in it, and nothing else."""

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and step % 2 == 1

    def __repr__(self) -> str:
        return "Odd()"


steps = st.integers(0, 60)
some_steps = st.lists(steps, max_size=6)
values: st.SearchStrategy[Any] = st.one_of(
    st.integers(-2, 30),
    some_steps,
    some_steps.map(tuple),
    some_steps.map(set),
    some_steps.map(frozenset),
    st.builds(range, steps, steps, st.integers(1, 9)),
    st.just(Odd()),
)
batches = values.map(Batch)
units = st.one_of(batches, values.map(Epoch))


def belongs(value: Any, step: int) -> bool:
    """What a unit's value means, spelled out."""
    if not isinstance(value, int):
        return step in value
    return True if value < 1 else step in range(value, step + 1, value)


def is_due(unit: TrainUnit, trained: int, epoch_length: int | None) -> bool:
    if isinstance(unit, Batch):
        return belongs(unit.value, trained)
    ends = {epoch * epoch_length: epoch for epoch in range(trained + 1)} if epoch_length else {}
    return trained in ends and belongs(unit.value, ends[trained])


@given(value=values, step=steps)
def test_should_stop_is_divisibility_or_membership(value: Any, step: int) -> None:
    assert Batch(value).should_stop(step) == belongs(value, step)


@given(value=values, step=steps)
def test_next_after_jumps_over_nothing(value: Any, step: int) -> None:
    following = Batch(value).next_after(step)
    assert following > step
    assert not any(belongs(value, between) for between in range(step + 1, min(following, 200)))


@given(value=st.one_of(st.integers(1, 30), some_steps.filter(lambda s: max(s, default=0) > 0)))
def test_next_after_of_periods_and_lists_is_exact(value: Any) -> None:
    assert Batch(value).should_stop(Batch(value).next_after(0))


@given(
    every=st.fixed_dictionaries({}, optional={REPORT: units, VALIDATE: units, CHECKPOINT: units}),
    trained=steps,
    epoch_length=st.integers(1, 9),
)
def test_due_is_what_each_unit_says_in_the_order_of_actions(
    every: dict[Any, TrainUnit], trained: int, epoch_length: int
) -> None:
    plan = Plan(length=Batch(100), every=every, epochs=Epochs(length=epoch_length))
    expected = [action for action, unit in every.items() if is_due(unit, trained, epoch_length)]
    assert plan.due(Progress(batches_trained=trained)) == expected


@given(
    length=st.one_of(st.integers(1, 80).map(Batch), st.integers(1, 20).map(Epoch)),
    every=st.lists(units, max_size=3),
    epoch_length=st.integers(1, 9),
)
def test_next_stop_jumps_over_nothing_that_is_due(length: TrainUnit, every: list[TrainUnit], epoch_length: int) -> None:
    plan = Plan(
        length=length,
        every=dict(zip((REPORT, VALIDATE, CHECKPOINT), every, strict=False)),
        epochs=Epochs(length=epoch_length),
    )
    total = length.value * (epoch_length if isinstance(length, Epoch) else 1)  # type: ignore[operator]
    wanted = {n for n in range(1, total + 1) if any(is_due(u, n, epoch_length) for u in every)}
    wanted |= set(range(epoch_length, total + 1, epoch_length)) | {total}
    visited = walk(plan)
    assert wanted <= visited
    assert max(visited) == total


@given(length=st.integers(1, 60), every=st.lists(batches, max_size=3))
def test_without_epochs_only_batches_count(length: int, every: list[TrainUnit]) -> None:
    actions = dict(zip((REPORT, VALIDATE, CHECKPOINT), every, strict=False))
    plan = Plan(length=Batch(length), every=actions, epochs=Epochs(length=None))
    wanted = {n for n in range(1, length + 1) if any(is_due(u, n, None) for u in every)}
    assert wanted | {length} <= walk(plan)


def walk(plan: Plan) -> set[int]:
    """Every number of batches at which training looks up."""
    progress, visited = Progress(), set()
    while not plan.finished(progress):
        stop = plan.next_stop(progress)
        assert stop > progress.batches_trained
        progress.batches_trained = stop
        visited.add(stop)
    return visited


def test_a_plain_plan_stops_no_more_often_than_it_must() -> None:
    plan = Plan(length=Batch(100), every={REPORT: Batch(40), VALIDATE: Batch([10, 70])}, epochs=Epochs(length=30))
    assert walk(plan) == {10, 30, 40, 60, 70, 80, 90, 100}


@pytest.mark.parametrize(("trained", "finished"), [(9, False), (10, True), (11, True)])
def test_finished_when_the_length_is_trained(trained: int, finished: bool) -> None:
    plan = Plan(length=Epoch(2), every={}, epochs=Epochs(length=5))
    assert plan.finished(Progress(batches_trained=trained)) is finished


def test_coinciding_actions_keep_their_order() -> None:
    every = {REPORT: Batch(2), VALIDATE: Batch(4), CHECKPOINT: Batch(2)}
    plan = Plan(length=Batch(8), every=every, epochs=Epochs(length=None))
    assert plan.due(Progress(batches_trained=4)) == [REPORT, VALIDATE, CHECKPOINT]
    assert plan.due(Progress(batches_trained=6)) == [REPORT, CHECKPOINT]


@pytest.mark.parametrize("part", ["length", "period"])
def test_epochs_of_data_without_a_length_are_refused(part: str) -> None:
    length, period = (Epoch(3), Batch(1)) if part == "length" else (Batch(3), Epoch(3))
    with pytest.raises(ValueError, match=r"Epoch\(3\) counts epochs.*no length.*use pytorch\.Batch"):
        Plan(length=length, every={REPORT: period}, epochs=Epochs(length=None))


def test_a_period_below_one_is_always_due() -> None:
    assert all(Batch(0).should_stop(step) for step in range(4))


def test_step_zero_is_never_due_by_a_period() -> None:
    assert not Batch(3).should_stop(0)


def test_several_arguments_are_a_schedule() -> None:
    assert Batch(1, 5, 10) == Batch([1, 5, 10])


def test_units_of_different_kinds_differ() -> None:
    assert Batch(3) != Epoch(3)
    assert Batch(3) != TrainUnit(3)
    assert Batch(3) != 3


@given(value=values, other=values)
def test_equality_is_that_of_the_values(value: Any, other: Any) -> None:
    assert (Batch(value) == Batch(other)) == (value == other)


@given(value=values, other=values)
def test_equal_units_hash_alike(value: Any, other: Any) -> None:
    assert Batch(value) != Batch(other) or hash(Batch(value)) == hash(Batch(other))


def test_equal_schedules_hash_alike() -> None:
    assert hash(Batch([1, 5])) == hash(Batch([1, 5]))
    assert len({Epoch([2]), Epoch([2]), Epoch(2)}) == 2


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        (Batch(3), "Batch(3)"),
        (Epoch([1, 2]), "Epoch([1, 2])"),
        (Batch(1, 5), "Batch([1, 5])"),
        (Batch(Odd()), "Batch(Odd())"),
    ],
)
def test_repr_is_what_to_type(unit: TrainUnit, text: str) -> None:
    assert repr(unit) == text


@pytest.mark.parametrize("value", [None, True, 1.0, math.nan, "10", b"10", iter([1])])
def test_bad_values_are_named_with_what_to_write(value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        Epoch(value)
    assert repr(value) in str(caught.value)
    assert "Epoch(100)" in str(caught.value)
    assert "Epoch([5, 30])" in str(caught.value)


@pytest.mark.parametrize("step", [True, 1.5, "3", None])
def test_bad_steps_of_a_schedule_are_named(step: Any) -> None:
    with pytest.raises(TypeError, match=f"holds {step!r}.*integers"):
        Batch([1, step])


def test_a_boundary_is_an_action_and_its_unit() -> None:
    assert _TrainBoundary(VALIDATE, Batch(3)) == _TrainBoundary(step_type=VALIDATE, unit=Batch(3))


@pytest.mark.parametrize(
    ("given", "value"), [(np.int64(5), 5), ([np.int32(2), 4], [2, 4]), (np.arange(1, 4), [1, 2, 3]), ((3, 1), (3, 1))]
)
def test_whole_numbers_of_numpy_are_whole_numbers(given: Any, value: Any) -> None:
    assert Batch(given) == Batch(value)
    assert repr(Batch(given)) == f"Batch({value})"


@pytest.mark.parametrize("given", [True, np.True_, 1.0, np.float64(1), "3", None, [True], [np.float32(2)]])
def test_other_values_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="integer"):
        Batch(given)


# Epochs of several ranks


@given(length=st.integers(1, 20), size=st.integers(1, 6), batches=st.integers(0, 50))
def test_epochs_of_ranks_are_passes_over_the_data(length: int, size: int, batches: int) -> None:
    epochs = Epochs(length=length, ranks=size)
    first_of_step = [step * size for step in range(batches + 1)]  # numbers of loader batches, over all ranks
    assert [epochs.of(step) for step in range(batches + 1)] == [number // length for number in first_of_step]
    for count in range(5):
        end = epochs.end_of(count)
        assert end * size >= count * length > (end - 1) * size


@given(
    length=st.integers(1, 20),
    size=st.integers(1, 6),
    since=st.integers(0, 30),
    passed=st.integers(0, 100),
    count=st.integers(0, 9),
)
def test_epochs_go_on_where_another_number_of_ranks_left_off(
    length: int, size: int, since: int, passed: int, count: int
) -> None:
    epochs = Epochs(length=length, ranks=size, since=since, passed=passed)
    used = passed
    for batch in range(since, since + count):
        assert epochs.of(batch) == used // length
        used += size
