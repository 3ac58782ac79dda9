"""core_context.searcher: the one operation of the configured length, as old programs expect it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import determined as det
from determined import core, errors, tracking

Managed = Callable[..., det.ClusterInfo]
pytestmark = pytest.mark.filterwarnings("ignore:core_context.searcher:FutureWarning")


def configure(managed: Managed, max_length: Any) -> None:
    managed({"searcher": {"metric": "loss", "max_length": max_length}})


@pytest.mark.parametrize("mode", core.SearcherMode)
@pytest.mark.parametrize("length", [{"batches": 40}, {"epochs": 40}, {"records": 40}, 40])
def test_one_operation_of_the_configured_length(length: Any, mode: core.SearcherMode, managed: Managed) -> None:
    configure(managed, length)
    lengths = []
    with core.init() as context:
        for operation in context.searcher.operations(mode):
            lengths.append(operation.length)
            operation.report_completed(0.5)
    assert lengths == [40]


@pytest.mark.parametrize(
    ("length", "unit"),
    [
        ({"batches": 4}, core.Unit.BATCHES),
        ({"epochs": 4}, core.Unit.EPOCHS),
        ({"records": 4}, core.Unit.RECORDS),
        (4, None),
    ],
)
def test_configured_units(length: Any, unit: core.Unit | None, managed: Managed) -> None:
    configure(managed, length)
    with core.init() as context:
        assert context.searcher.get_configured_units() is unit


def test_operations_are_deprecated(managed: Managed) -> None:
    configure(managed, 1)
    with core.init() as context, pytest.warns(FutureWarning, match="deprecated") as caught:
        context.searcher.operations()
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "length",
    [None, {}, {"batches": 0}, {"batches": -1}, {"batches": "4"}, {"hours": 4}, {"batches": 1, "epochs": 1}, True, 0],
)
def test_length_that_is_none_is_refused(length: Any, managed: Managed) -> None:
    configure(managed, length)
    with core.init() as context:
        with pytest.raises(errors.InvalidExperimentException, match="max_length="):
            next(iter(context.searcher.operations()))
        with pytest.raises(errors.InvalidExperimentException, match="max_length="):
            context.searcher.get_configured_units()


def test_local_run_gets_one_operation_of_one_epoch() -> None:
    with core.init() as context:
        assert context.searcher.get_configured_units() is core.Unit.EPOCHS
        for operation in context.searcher.operations():
            assert operation.length == 1
            operation.report_completed(0.5)


def test_time_of_a_rung_based_search_is_a_length(managed: Managed) -> None:
    managed({"searcher": {"metric": "loss", "time_metric": "batches", "max_time": 40}})
    with core.init() as context:
        assert next(iter(context.searcher.operations())).length == 40
        assert context.searcher.get_configured_units() is core.Unit.BATCHES


def test_progress_of_the_operation_is_recorded(managed: Managed, records: tracking.TrackingReader) -> None:
    configure(managed, {"batches": 40})
    with core.init() as context:
        for operation in context.searcher.operations():
            operation.report_progress(10)
            operation.report_completed(0.5)
    assert records.trials(1)[0].progress == 0.25


def test_progress_beyond_the_length_is_the_whole(managed: Managed, records: tracking.TrackingReader) -> None:
    configure(managed, {"batches": 40})
    with core.init() as context:
        for operation in context.searcher.operations():
            operation.report_progress(50)
            operation.report_completed(0.5)
    assert records.trials(1)[0].progress == 1


def test_negative_progress_is_refused(managed: Managed) -> None:
    configure(managed, 4)
    with core.init() as context:
        operation = next(iter(context.searcher.operations()))
        with pytest.raises(ValueError, match="-1"):
            operation.report_progress(-1)


def test_completing_twice_is_refused(managed: Managed) -> None:
    configure(managed, 4)
    with core.init() as context:
        operation = next(iter(context.searcher.operations()))
        operation.report_completed(0.5)
        with pytest.raises(RuntimeError, match="twice"):
            operation.report_completed(0.5)


def test_operation_must_be_completed(managed: Managed) -> None:
    configure(managed, 4)
    with core.init() as context, pytest.raises(RuntimeError, match="report_completed"):
        list(context.searcher.operations())


def test_asking_off_the_chief_is_refused_in_chief_only_mode(managed: Managed) -> None:
    class Worker(core.DistributedContext):
        is_chief = False  # type: ignore[assignment]

    configure(managed, 4)
    with (
        core.init(distributed=Worker.single()) as context,
        pytest.raises(errors.WrongRankError, match="only the chief"),
    ):
        next(iter(context.searcher.operations(core.SearcherMode.ChiefOnly)))
