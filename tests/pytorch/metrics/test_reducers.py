"""Reducers of the user's own: functions, MetricReducers, torchmetrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st

from determined import errors, pytorch
from determined.pytorch import Batch, PyTorchTrialContext
from determined.pytorch._metrics.reducers import FunctionReducer
from trials import LineTrial, fit, records


@pytest.fixture
def context() -> Iterator[PyTorchTrialContext]:
    with pytorch.init() as context:
        yield context


class Sum(pytorch.MetricReducer):
    """Adds numbers; keeps count of its resets."""

    def __init__(self) -> None:
        self.resets = 0
        self.total = 0.0

    def reset(self) -> None:
        self.resets += 1
        self.total = 0.0

    def per_slot_reduce(self) -> float:
        return self.total

    def cross_slot_reduce(self, per_slot_metrics: list[float]) -> Any:
        return sum(per_slot_metrics)


# Functions


@given(values=st.lists(st.integers(), min_size=1, max_size=40), ranks=st.integers(1, 6))
def test_function_gets_the_values_of_all_ranks_in_the_original_order(values: list[int], ranks: int) -> None:
    received: list[list[int]] = []
    reducer = FunctionReducer(received.append)
    reducer.cross_slot_reduce([values[rank::ranks] for rank in range(ranks)])
    assert received == [values]


@given(values=st.lists(st.sampled_from([None, 0, False, "", ()]), min_size=1), ranks=st.integers(1, 4))
def test_function_gets_values_that_look_like_nothing_too(values: list[Any], ranks: int) -> None:
    received: list[list[Any]] = []
    FunctionReducer(received.append).cross_slot_reduce([values[rank::ranks] for rank in range(ranks)])
    assert received == [values]


def test_function_reducer_is_updated_and_reset(context: PyTorchTrialContext) -> None:
    handle = context.wrap_reducer(sum, "total")
    handle.update(1)
    handle.update(2)
    assert context.reduce_metrics(for_training=True) == {"total": 3}
    context.reset_reducers()
    handle.update(4)
    assert context.reduce_metrics(for_training=True) == {"total": 4}


def test_function_without_values_is_not_called_and_has_no_result(
    context: PyTorchTrialContext, caplog: pytest.LogCaptureFixture
) -> None:
    average = context.wrap_reducer(lambda values: sum(values) / len(values), "average")
    assert context.reduce_metrics(for_training=False) == {}
    assert context.reduce_metrics(for_training=True) == {}
    (warning,) = caplog.messages
    assert warning.startswith("The reducer 'average' (FunctionReducer) got no values in a validation")
    assert "for_validation=False" in warning
    average.update(2)
    assert context.reduce_metrics(for_training=True) == {"average": 2.0}


def test_function_without_a_name_returns_a_dict(context: PyTorchTrialContext) -> None:
    handle = context.wrap_reducer(lambda values: {"low": min(values), "high": max(values)})
    for value in (3, 1, 2):
        handle.update(value)
    assert context.reduce_metrics(for_training=False) == {"low": 1, "high": 3}


def test_one_function_can_serve_two_metrics(context: PyTorchTrialContext) -> None:
    first, second = context.wrap_reducer(sum, "first"), context.wrap_reducer(sum, "second")
    first.update(1)
    second.update(2)
    assert context.reduce_metrics(for_training=True) == {"first": 1, "second": 2}


# Rules


def test_metric_reducer_is_returned_itself(context: PyTorchTrialContext) -> None:
    reducer = Sum()
    assert context.wrap_reducer(reducer, "total") is reducer


@pytest.mark.parametrize("for_training", [True, False])
def test_reducers_serve_what_they_were_wrapped_for(context: PyTorchTrialContext, for_training: bool) -> None:
    context.wrap_reducer(Sum(), "both")
    context.wrap_reducer(Sum(), "training", for_validation=False)
    context.wrap_reducer(Sum(), "validation", for_training=False)
    own = "training" if for_training else "validation"
    assert set(context.reduce_metrics(for_training)) == {"both", own}


def test_old_place_of_wrap_reducer_still_works(context: PyTorchTrialContext) -> None:
    context.experimental.wrap_reducer(sum, "total").update(4)
    assert context.experimental.reduce_metrics(for_training=True) == {"total": 4}
    context.experimental.reset_reducers()
    assert context.experimental.reduce_metrics(for_training=True) == {}


def test_one_gather_serves_all_reducers() -> None:
    from determined import core

    class Counting(core.DistributedContext):
        gathers = 0

        def allgather(self, item: Any) -> list[Any]:
            self.gathers += 1
            return super().allgather(item)

    one = Counting(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
    with pytorch.init(distributed=one) as context:
        for name in "abc":
            context.wrap_reducer(Sum(), name)
        context.reduce_metrics(for_training=True)
    assert one.gathers == 1


def test_results_of_all_ranks_are_combined() -> None:
    from determined import core

    class Threefold(core.DistributedContext):
        def allgather(self, item: Any) -> list[Any]:
            return [item] * 3

    one = Threefold(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
    with pytorch.init(distributed=one) as context:
        reducer = context.wrap_reducer(Sum(), "total")
        reducer.total = 2.0
        assert context.reduce_metrics(for_training=True) == {"total": 6.0}


@pytest.mark.parametrize("method", ["reset", "per_slot_reduce", "cross_slot_reduce"])
def test_error_in_user_code_names_reducer_and_method(context: PyTorchTrialContext, method: str) -> None:
    def fail(self: Any, *args: Any) -> Any:
        raise KeyError("lost")

    reducer = type("Broken", (Sum,), {method: fail})()
    context.wrap_reducer(reducer, "score")
    with pytest.raises(ValueError, match=rf"'score' \(Broken\) failed in {method}: KeyError: 'lost'") as caught:  # noqa: PT012
        context.reset_reducers()
        context.reduce_metrics(for_training=True)
    assert isinstance(caught.value.__cause__, KeyError)


def test_error_in_a_function_that_got_values_names_it(context: PyTorchTrialContext) -> None:
    context.wrap_reducer(lambda values: 1 / 0, "broken").update(1)
    with pytest.raises(ValueError, match=r"'broken'.*cross_slot_reduce: ZeroDivisionError"):
        context.reduce_metrics(for_training=True)


# torchmetrics


def test_torchmetrics_metric_is_a_reducer(context: PyTorchTrialContext) -> None:
    accuracy = context.wrap_reducer(torchmetrics.MeanMetric(), "mean")
    accuracy.update(torch.tensor([1.0, 2.0, 6.0]))
    assert context.reduce_metrics(for_training=False) == {"mean": 3.0}


def test_torchmetrics_collection_reports_its_members(context: PyTorchTrialContext) -> None:
    members = {"mean": torchmetrics.MeanMetric(), "largest": torchmetrics.MaxMetric()}
    collection = context.wrap_reducer(torchmetrics.MetricCollection(members))
    collection.update(torch.tensor([1.0, 3.0]))
    assert context.reduce_metrics(for_training=False) == {"mean": 2.0, "largest": 3.0}


def test_torchmetrics_arrays_stay_arrays(context: PyTorchTrialContext) -> None:
    matrix = context.wrap_reducer(torchmetrics.ConfusionMatrix(task="multiclass", num_classes=2), "confusion")
    matrix.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    assert context.reduce_metrics(for_training=False)["confusion"].tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize("collection", [False, True])
def test_torchmetrics_without_values_report_nothing(
    context: PyTorchTrialContext, collection: bool, caplog: pytest.LogCaptureFixture
) -> None:
    mean = torchmetrics.MeanMetric()
    name = None if collection else "mean"
    context.wrap_reducer(torchmetrics.MetricCollection([mean]) if collection else mean, name)
    assert context.reduce_metrics(for_training=True) == {}
    (warning,) = caplog.messages
    assert "got no values in a window of training" in warning


def test_torchmetrics_metric_twice_is_refused(context: PyTorchTrialContext) -> None:
    metric = torchmetrics.MeanMetric()
    context.wrap_reducer(metric, "a")
    with pytest.raises(errors.MisuseError, match="wrapped already"):
        context.wrap_reducer(metric, "b")


def test_torchmetrics_collection_with_a_name_is_refused(context: PyTorchTrialContext) -> None:
    collection = context.wrap_reducer(torchmetrics.MetricCollection([torchmetrics.MeanMetric()]), "all")
    collection.update(torch.ones(1))
    with pytest.raises(errors.MisuseError, match=r"'all'.*without a name"):
        context.reduce_metrics(for_training=True)


# In a run


def all_values(values: list[Any]) -> list[Any]:
    return values


class ReducingTrial(LineTrial):
    """Feeds a reducer, a function and a metric, in training and in validation."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        self.own = context.wrap_reducer(Sum(), "own")
        self.trained = context.wrap_reducer(all_values, "trained", for_validation=False)
        self.evaluated = context.wrap_reducer(all_values, "evaluated", for_training=False)
        self.mean = context.wrap_reducer(torchmetrics.MeanMetric(), "mean")

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        assert self.own.resets, "it must be reset before the first batch"
        self.own.total += 1
        self.trained.update(batch_idx)
        self.mean.update(batch_idx)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.own.total += 10
        self.evaluated.update(batch_idx)
        self.mean.update(100)
        return super().evaluate_batch(batch, batch_idx)


def test_windows_and_validations_begin_with_empty_reducers() -> None:
    fit(ReducingTrial, max_length=Batch(5), reporting_period=Batch(2), validation_period=Batch(4))
    training = [report.metrics for report in records().metrics(1, "training")]
    assert [(m["own"], m["trained"], m["mean"]) for m in training] == [
        (2, [0, 1], 0.5),
        (2, [2, 3], 2.5),
        (1, [4], 4.0),
    ]
    validation = [report.metrics for report in records().metrics(1, "validation")]
    assert [(m["own"], m["evaluated"], m["mean"]) for m in validation] == [(20, [0, 1], 100.0)] * 2
    assert not any("evaluated" in m for m in training)
    assert not any("trained" in m for m in validation)


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        (pytorch.Reducer.AVG, 0.5),
        (pytorch.Reducer.SUM, 1.0),
        (pytorch.Reducer.MAX, 1.0),
        (pytorch.Reducer.MIN, 0.0),
        ({"value": pytorch.Reducer.MAX}, 1.0),
    ],
)
def test_evaluation_reducers_combine_batches(reducer: Any, expected: float) -> None:
    class Trial(LineTrial):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"value": batch_idx}

        def evaluation_reducer(self) -> Any:
            return reducer

    fit(Trial, max_length=Batch(1))
    (report,) = records().metrics(1, "validation")
    assert report.metrics["value"] == expected


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([0.5, 1.5], [0.5, 1.5]),
        ({"cat": 0.5}, {"cat": 0.5}),
        ("text", None),
        ({"cat": "text"}, None),
        (object(), None),
    ],
    ids=["array", "list", "mapping", "string", "mapping of strings", "object"],
)
def test_results_are_recorded_as_they_are_if_they_are_numbers(
    result: Any, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Trial(LineTrial):
        def __init__(self, context: PyTorchTrialContext) -> None:
            super().__init__(context)
            self.reducer = context.wrap_reducer(lambda _: {"result": result}, for_training=False)

        def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
            self.reducer.update(batch_idx)
            return super().evaluate_batch(batch, batch_idx)

    fit(Trial, max_length=Batch(2), validation_period=Batch(1))
    assert [report.metrics["result"] for report in records().metrics(1, "validation")] == [expected, expected]
    assert [message.partition(" at batch 1")[0] for message in caplog.messages] == (
        ["The validation metric 'result' is not a number"] if expected is None else []
    )


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_averages_do_not_depend_on_the_order(values: list[float]) -> None:
    from determined.pytorch._metrics.reducers import mean

    assert mean(values) == mean(sorted(values)) == mean(values[::-1])


def test_two_reducers_cannot_report_under_one_name(context: PyTorchTrialContext) -> None:
    context.wrap_reducer(sum, "total")
    with pytest.raises(AssertionError, match=r"'total'.*use another name"):
        context.wrap_reducer(max, "total", for_validation=False)


def test_training_and_validation_may_use_one_name(context: PyTorchTrialContext) -> None:
    context.wrap_reducer(sum, "total", for_validation=False).update(1)
    context.wrap_reducer(max, "total", for_training=False).update(2)
    assert (context.reduce_metrics(True), context.reduce_metrics(False)) == ({"total": 1}, {"total": 2})


@pytest.mark.parametrize("result", [torch.tensor(2.5), torch.tensor([2.5]), np.float64(2.5), np.array(2.5)], ids=repr)
@pytest.mark.parametrize("name", ["score", None])
def test_result_of_one_number_is_a_number_that_a_searcher_can_compare(result: Any, name: str | None) -> None:
    class Trial(LineTrial):
        def __init__(self, context: PyTorchTrialContext) -> None:
            super().__init__(context)
            self.score = context.wrap_reducer(lambda _: result if name else {"score": result}, name)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.score.update(batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)

        def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
            self.score.update(batch_idx)
            return super().evaluate_batch(batch, batch_idx)

    fit(Trial, {"exp_conf": {"searcher": {"metric": "score"}}}, checkpoint_policy="best")
    assert [report.metrics["score"] for report in records().metrics(1)] == [2.5, 2.5]
    best = records().trial(1).best_validation
    assert best is not None
    assert best.value == 2.5
