"""Metrics on their way from `train_batch` to the report."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from determined import pytorch
from determined.pytorch import Batch
from determined.pytorch._metrics.window import MetricWindow, _Held, averaged_over_ranks, averages, hold_on_device
from trials import LineTrial, fit, records


def filled(*batches: Any) -> MetricWindow:
    metrics = MetricWindow()
    for batch in batches:
        metrics.add(batch)
    return metrics


def window(*batches: Any) -> list[dict[str, Any]]:
    """What a window gives back for what was added."""
    return [dict(batch) for batch in filled(*batches).take()]


def averaged(*batches: Any) -> dict[str, Any]:
    """What is reported of a window."""
    return averages(filled(*batches).take())


@pytest.mark.parametrize(
    "value",
    [
        2.5,
        np.float32(2.5),
        np.float64(2.5),
        np.array(2.5),
        np.array([2.5]),
        torch.tensor(2.5),
        torch.tensor([2.5], dtype=torch.float64),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor(2.5, dtype=torch.float16, requires_grad=True),
    ],
    ids=repr,
)
def test_scalars_of_any_kind_become_a_float(value: Any) -> None:
    (batch,) = window({"m": value})
    assert batch == {"m": 2.5}
    assert isinstance(batch["m"], float)


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3), torch.tensor([3], dtype=torch.int32)], ids=repr)
def test_whole_numbers_stay_whole(value: Any) -> None:
    (batch,) = window({"m": value})
    assert batch == {"m": 3}
    assert isinstance(batch["m"], int)


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([1, 2]).bfloat16()])
def test_arrays_stay_arrays(value: Any) -> None:
    (batch,) = window({"m": value})
    assert isinstance(batch["m"], np.ndarray)
    assert batch["m"].tolist() == [1.0, 2.0]


@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from([(), (1,), (2, 3)]),
            st.sampled_from([torch.float32, torch.float64, torch.half, torch.int64]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_values_left_on_a_device_are_read_as_those_in_host_memory_are(kinds: list[Any]) -> None:
    values = [torch.arange(i, i + math.prod(shape)).reshape(shape).to(dtype) for i, (shape, dtype) in enumerate(kinds)]
    metrics = MetricWindow()
    metrics._columns, metrics._count = {"m": [_Held(value) for value in values]}, len(values)  # as on a GPU
    for left, right in zip(metrics.take(), window(*[{"m": value} for value in values]), strict=True):
        assert np.shape(left["m"]) == np.shape(right["m"])
        assert np.array_equal(left["m"], right["m"])


def test_values_in_containers_left_on_a_device_are_read() -> None:
    metrics = MetricWindow()
    metrics._columns = {"m": [[_Held(torch.tensor(1.0)), {"a": _Held(torch.tensor([2.0]))}]]}  # as on a GPU
    metrics._count = 1
    assert list(metrics.take()) == [{"m": [1.0, {"a": 2.0}]}]


def test_inference_tensors_can_be_left_on_a_device() -> None:
    with torch.inference_mode():
        tensors = [torch.tensor(1.0), torch.tensor(2.0) + 1]
        inside = hold_on_device(tensors[0])
    metrics = MetricWindow()
    metrics._columns, metrics._count = {"m": [inside, hold_on_device(tensors[1])]}, 2  # as on a GPU
    with torch.inference_mode():
        tensors[0].add_(5)
    assert metrics.take().columns == {"m": [1.0, 3.0]}


def test_whole_numbers_left_on_a_device_stay_whole() -> None:
    metrics = MetricWindow()
    metrics._columns, metrics._count = {"m": [_Held(torch.tensor(2**60 + 1)), _Held(torch.tensor(3))]}, 2
    assert metrics.take().columns == {"m": [2**60 + 1, 3]}


def test_a_bare_tensor_is_the_loss() -> None:
    assert window(torch.tensor(0.5)) == [{"loss": 0.5}]


def test_a_mapping_of_another_type_is_taken() -> None:
    import types

    assert window(types.MappingProxyType({"a": 1.0})) == [{"a": 1.0}]


@pytest.mark.parametrize("value", [None, 0.5, [0.5], "loss"])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"train_batch\(\) returned .*loss tensor or a dict"):
        window(value)


@pytest.mark.parametrize("make", [torch.ones, np.ones], ids=["tensor", "array"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_value_changed_in_place_later_does_not_change_the_report(make: Any, size: int) -> None:
    value = make(size)
    metrics = filled({"m": value})
    value += 1
    (batch,) = metrics.take()
    assert np.all(batch["m"] == 1)


@pytest.mark.parametrize("values", [{"m": 1.0}, [1.0], [[1.0]]], ids=["dict", "list", "nested list"])
def test_a_container_changed_later_does_not_change_the_report(values: Any) -> None:
    before = copy.deepcopy(values)
    metrics = filled({"values": values})
    inner = values[0] if isinstance(values, list) and isinstance(values[0], list) else values
    inner["m" if isinstance(inner, dict) else 0] = 2.0
    assert list(metrics.take()) == [{"values": before}]


def test_the_graph_is_released_with_the_batch() -> None:
    metrics = MetricWindow()
    weight = torch.ones(3, requires_grad=True)
    activation = weight * 2
    released = weakref.ref(activation)
    metrics.add({"loss": activation.square().sum(), "activation": activation, "parts": [{"one": activation * 1}]})
    del activation
    gc.collect()
    assert released() is None
    assert len(metrics) == 1


def test_taking_begins_anew() -> None:
    metrics = filled({"m": 1.0})
    metrics.take()
    assert (len(metrics), list(metrics.take())) == (0, [])


@given(values=st.lists(st.floats(allow_nan=False, width=64, min_value=-1e300, max_value=1e300), min_size=1))
def test_averages_are_exact_sums_divided(values: list[float]) -> None:
    expected = math.fsum(values) / len(values)
    assert averaged(*[{"m": value} for value in values]) == {"m": expected}


@given(values=st.lists(st.integers(-(2**40), 2**40), min_size=1))
def test_averages_of_whole_numbers(values: list[int]) -> None:
    assert averaged(*[{"m": value} for value in values])["m"] == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 3], (2, 6)),
        ([[1, 1], [3, 3]], [[2, 2], [6, 6]]),
        (np.array([1.0, 3.0]), [2.0, 6.0]),
        (torch.tensor([1.0, 3.0]), torch.tensor([2.0, 6.0], dtype=torch.float64)),
        ([torch.tensor(1.0, requires_grad=True), 3], [np.float32(2), torch.tensor([6])]),
        ([torch.tensor([1.0, 3.0])], [torch.tensor([2.0, 6.0])]),
    ],
    ids=["list and tuple", "nested", "array", "tensor", "list of tensors", "list of vectors"],
)
def test_lists_and_arrays_average_to_one_number(first: Any, second: Any) -> None:
    assert averaged({"m": first}, {"m": second}) == {"m": 3.0}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("warm-up", "training"),
        ({"a": 1.0}, {"a": 2.0}),
        (1.0, "nan"),
        ([1.0, 2.0], [1.0, 2.0, 3.0]),
        ([[1.0], [2.0, 3.0]], [[1.0], [2.0, 3.0]]),
        ([], []),
        ([None], [1.0]),
        (1 + 2j, 1j),
        (b"1", b"2"),
        ([range(9)], range(9)),
    ],
    ids=str,
)
def test_values_without_an_average_stay_as_they_are(first: Any, second: Any) -> None:
    assert averaged({"m": first}, {"m": second}) == {"m": [first, second]}


def test_ranks_average_what_has_an_average() -> None:
    rank = filled({"a": 1.0, "b": [1.0, 2.0], "c": "text", "d": 1, "e": None}).take()
    other = filled({"a": 3.0, "b": [3.0, 4.0], "c": "text", "d": [1], "e": None}).take()
    (batch,) = averaged_over_ranks([rank, other])
    assert batch.pop("b").tolist() == [2.0, 3.0]
    assert batch == {"a": 2.0, "c": None, "d": None}


def test_batches_keep_the_names_that_they_have() -> None:
    batches = [{"a": 1.0}, {"b": 2.0}, {"a": 3.0, "b": 4.0}]
    assert window(*batches) == batches


def test_metrics_that_only_some_batches_have_are_averaged_over_those() -> None:
    assert averaged({"a": 1.0}, {"a": 3.0, "b": 5.0}, {"b": 7.0}) == {"a": 2.0, "b": 6.0}


@pytest.mark.parametrize(
    ("values", "expected"),
    [([math.inf, 1.0], math.inf), ([math.inf, -math.inf], math.nan), ([math.nan, 1.0], math.nan)],
)
def test_averages_of_values_that_are_not_finite(values: list[float], expected: float) -> None:
    with np.errstate(invalid="ignore"):
        average = averaged(*[{"m": value} for value in values])["m"]
    assert average == expected or (math.isnan(average) and math.isnan(expected))


def test_average_of_sums_beyond_the_largest_float_is_no_error() -> None:
    with np.errstate(over="ignore"):
        assert averaged({"m": 1.7e308}, {"m": 1.7e308})["m"] > 1e308


@given(data=st.data())
def test_mixed_kinds_of_one_metric_average(data: Any) -> None:
    kinds = st.sampled_from([float, np.float32, torch.tensor, lambda v: torch.tensor([v])])
    numbers = data.draw(st.lists(st.integers(-100, 100), min_size=1, max_size=8))
    given_values = [data.draw(kinds)(float(number)) for number in numbers]
    assert averaged(*[{"m": value} for value in given_values])["m"] == pytest.approx(np.mean(numbers))


# In a run


class InPlaceTrial(LineTrial):
    """Returns the same tensor every time, counted up in place."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.count = torch.zeros(())

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        super().train_batch(batch, epoch_idx, batch_idx)
        self.count += 1
        return {"count": self.count}


def test_a_tensor_counted_up_in_place_is_averaged_as_it_was_returned() -> None:
    fit(InPlaceTrial, max_length=Batch(5))
    (report,) = records().metrics(1, "training")
    assert report.metrics["count"] == 3.0


class VaryingTrial(LineTrial):
    """Reports a metric on every third batch only."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        return metrics | ({"third": float(batch_idx)} if batch_idx % 3 == 0 else {})


def test_training_metric_names_may_vary() -> None:
    fit(VaryingTrial, max_length=Batch(5), reporting_period=Batch(5))
    (report,) = records().metrics(1, "training")
    assert report.metrics["third"] == 1.5


def test_losses_of_a_window_average_to_the_exact_mean() -> None:
    losses: list[float] = []

    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            losses.append(metrics["loss"].item())
            return metrics

    fit(Trial, max_length=Batch(6))
    (report,) = records().metrics(1, "training")
    assert report.metrics["loss"] == math.fsum(losses) / len(losses)


@pytest.mark.parametrize("method", ["train_batch", "evaluate_batch"])
def test_metrics_may_be_computed_in_inference_mode(method: str) -> None:
    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            with torch.inference_mode():
                return metrics | {"two": torch.ones(3).sum() - 1, "vector": torch.ones(2) * 2}

        @torch.inference_mode()
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return super().evaluate_batch(batch, batch_idx) | {"two": torch.ones(2).sum(), "vector": torch.ones(2) * 2}

    fit(Trial, max_length=Batch(2))
    (report,) = records().metrics(1, "training" if method == "train_batch" else "validation")
    assert (report.metrics["two"], report.metrics["vector"]) == (2.0, 2.0)


def test_validation_metrics_changed_in_place_are_combined_as_they_were_returned() -> None:
    class Trial(LineTrial):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.total = torch.zeros(()) if batch_idx == 0 else self.total.add_(1)
            return {"total": self.total}

    fit(Trial, max_length=Batch(1))
    (report,) = records().metrics(1, "validation")
    assert report.metrics["total"] == 0.5
