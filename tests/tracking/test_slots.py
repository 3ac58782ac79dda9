"""The slots of a machine, which experiments share."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator

import driving
import pytest

from determined import errors, tracking
from determined.tracking import Changeset, ExperimentChange


@pytest.fixture
def slots(store: tracking.ExperimentStore, database: pathlib.Path) -> Iterator[tracking.Slots]:
    with tracking.Slots(database) as slots:
        yield slots


def test_the_lowest_free_slots_are_given(slots: tracking.Slots) -> None:
    assert slots.take(1, 1, 2, 4) == [0, 1]
    assert slots.take(1, 2, 1, 4) == [2]
    slots.release(1)
    assert slots.take(1, 3, 3, 4) == [0, 1, 3]


def test_nothing_is_given_if_too_few_are_free(slots: tracking.Slots) -> None:
    slots.take(1, 1, 3, 4)
    assert slots.take(1, 2, 2, 4) is None
    assert [lease.slot for lease in slots.held()] == [0, 1, 2]
    assert slots.take(1, 3, 5, 4) is None


def test_fewer_slots_are_given_down_to_the_least(slots: tracking.Slots) -> None:
    slots.take(1, 1, 1, 4)
    assert slots.take(1, 2, 2, 4, least=1) == [1, 2]
    assert slots.take(1, 3, 8, 4, least=2) is None
    assert slots.take(1, 3, 8, 4, least=1) == [3]


def test_a_trial_needs_no_slot_at_all(slots: tracking.Slots) -> None:
    assert slots.take(1, 1, 0, 0) == []
    assert slots.held() == []


def test_a_negative_number_is_refused(slots: tracking.Slots) -> None:
    with pytest.raises(errors.TrackingException, match=r"take\(count=-1\).*from 0 on"):
        slots.take(1, 1, -1, 4)


def test_a_trial_that_asks_again_can_keep_what_it_has(slots: tracking.Slots) -> None:
    slots.take(1, 1, 2, 4)
    assert slots.take(1, 1, 2, 2) == [0, 1]
    assert slots.take(1, 1, 1, 2) == [0]
    assert [(lease.slot, lease.trial_id) for lease in slots.held()] == [(0, 1)]


def test_a_lease_says_whose_it_is(slots: tracking.Slots) -> None:
    slots.take(1, 7, 1, 4)
    (lease,) = slots.held()
    assert (lease.slot, lease.experiment_id, lease.trial_id) == (0, 1, 7)
    assert lease.process == tracking.RunProcess.current()


@pytest.mark.parametrize("gone", [driving.ended_process, driving.reused_pid])
def test_slots_of_a_process_that_is_gone_are_free(
    gone: Callable[[], tracking.RunProcess], slots: tracking.Slots, database: pathlib.Path
) -> None:
    slots.take(1, 1, 4, 4, gone())
    assert slots.held() == []
    with tracking.Slots(database) as others:
        assert others.take(2, 9, 4, 4) == [0, 1, 2, 3]
    assert {lease.trial_id for lease in slots.held()} == {9}


def test_slots_of_a_container_that_was_started_again_are_free(slots: tracking.Slots) -> None:
    here = tracking.RunProcess.current()
    assert here.identity is not None
    before = dataclasses.replace(here, identity=dataclasses.replace(here.identity, namespace="pid:[1]"))
    slots.take(1, 1, 4, 4, before)
    assert slots.take(2, 9, 4, 4) == [0, 1, 2, 3]


def test_slots_are_held_for_as_long_as_the_process_that_took_them_over_lives(
    slots: tracking.Slots, living: tracking.RunProcess
) -> None:
    slots.take(1, 1, 1, 1)
    slots.hand_over(1, living)
    assert slots.held()[0].process == living
    assert slots.take(1, 2, 1, 1) is None
    slots.hand_over(1, driving.ended_process())
    assert slots.take(1, 2, 1, 1) == [0]


def test_hosts_have_slots_of_their_own(slots: tracking.Slots, database: pathlib.Path) -> None:
    slots.take(1, 1, 1, 1)
    with tracking.Slots(database, "elsewhere") as others:
        assert others.take(1, 2, 1, 1, driving.elsewhere()) == [0]
        assert [lease.trial_id for lease in others.held()] == [2], "those of another host cannot be asked"
    assert [lease.trial_id for lease in slots.held()] == [1]


def test_a_lease_that_cannot_be_checked_expires_unless_the_runner_renews_it(
    store: tracking.ExperimentStore, database: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with tracking.Slots(database, "elsewhere") as slots:
        slots.take(store.experiment_id, 1, 1, 2, driving.elsewhere())
        slots.take(store.experiment_id + 1, 2, 1, 2, driving.elsewhere())
        monkeypatch.setattr(time, "time", lambda: now + 50)
        store.renew()  # of the first experiment
        monkeypatch.setattr(time, "time", lambda: now + 150)
        assert [lease.trial_id for lease in slots.held()] == [1]
        assert slots.take(store.experiment_id, 3, 1, 2, driving.elsewhere()) == [1]
        monkeypatch.setattr(time, "time", lambda: now + 300)
        assert slots.held() == []


def test_demands_say_what_living_runners_want_and_hold(
    store: tracking.ExperimentStore, slots: tracking.Slots, database: pathlib.Path
) -> None:
    with driving.claimed(database, priority=7, max_slots=3) as second, driving.claimed(database) as gone:
        gone.claim(driving.ended_process(), force=True)
        store.commit(Changeset(experiment_change=ExperimentChange(wanted_slots=5)))
        slots.take(2, 20, 2, 8)
        slots.take(1, 10, 1, 8)
        one, two = slots.demands()
        assert (one.experiment_id, one.wanted, one.held, one.priority, one.max_slots) == (1, 5, 1, None, None)
        assert (two.experiment_id, two.wanted, two.held, two.priority, two.max_slots) == (2, 0, 2, 7, 3)
        assert one.since < two.since
        second.release()
        assert [demand.experiment_id for demand in slots.demands()] == [1]


def test_the_demand_of_elastic_trials_has_their_smallest_number_of_slots(database: pathlib.Path) -> None:
    config = {"resources": {"slots_per_trial": {"min": 2, "max": 8}}}
    description = tracking.ExperimentDescription(name="elastic", config=config)
    with tracking.ExperimentStore.create(database, description) as store, tracking.Slots(database) as slots:
        store.claim()
        (demand,) = slots.demands()
        assert (demand.unit, demand.is_elastic) == (2, True)
        with pytest.raises(errors.InvalidRequestException, match="slots_per_trial=2"):
            store.ask(max_slots=1)


def test_a_new_claim_wants_nothing_yet(store: tracking.ExperimentStore, slots: tracking.Slots) -> None:
    store.commit(Changeset(experiment_change=ExperimentChange(wanted_slots=5)))
    store.claim()
    assert [demand.wanted for demand in slots.demands()] == [0]
