"""Metrics that are no finite numbers, or none at all: recorded, announced once, never the best, never the end."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from determined import core, pytorch
from determined._home import home
from determined.pytorch import Batch
from trials import LineTrial, fit, latest_checkpoint, records, saved_at, scripted

HUGE = 10**400
NON_FINITE = [math.nan, math.inf, -math.inf]


class ListedTrial(LineTrial):
    """Adds the values of a list, one a batch, to the training metrics as `extra`."""

    values: list[Any] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        value = self.values[batch_idx]
        return metrics if isinstance(value, str) and value == "missing" else {**metrics, "extra": value}


def listed(values: list[Any], base: type[LineTrial] = ListedTrial, **arguments: Any) -> list[Any]:
    """Train one batch for each value and return what is on record of them, one report a batch."""
    trial_class = type("Trial", (base,), {"values": values})
    fit(trial_class, **({"max_length": Batch(len(values)), "reporting_period": Batch(1)} | arguments))
    return [report.metrics.get("extra", "missing") for report in records().metrics(1, "training")]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(a == b or (a != a and b != b) for a, b in zip(ours, theirs, strict=True))


def curve(name: str) -> list[float]:
    (file,) = home().tensorboard(1, 1).glob("events.out.tfevents.*")
    events = map(Event.FromString, RawEventFileLoader(str(file)).Load())
    return [value.simple_value for event in events for value in event.summary.value if value.tag == name]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_training_metrics_that_are_not_finite_are_recorded_as_they_are() -> None:
    values = [1.0, *NON_FINITE, 2.0]
    assert same(listed(values), values)
    assert same(curve("Determined/extra"), values)


def test_tensors_that_are_not_finite_are_recorded_as_they_are() -> None:
    assert same(listed([torch.tensor(value) for value in NON_FINITE]), NON_FINITE)


def test_none_and_a_name_left_out_count_as_missing() -> None:
    assert listed([1.0, None, "missing", 3.0]) == [1.0, "missing", "missing", 3.0]
    assert curve("Determined/extra") == [1.0, 3.0]


def test_metric_that_some_batches_of_a_window_lack_is_averaged_over_the_others() -> None:
    assert listed([1.0, None, "missing", 4.0], reporting_period=Batch(4)) == [2.5]


@pytest.mark.parametrize("sign", [1, -1])
def test_training_number_beyond_all_floats_is_infinite(sign: int) -> None:
    assert listed([sign * HUGE, 1.0]) == [sign * math.inf, 1.0]
    assert curve("Determined/extra") == [sign * math.inf, 1.0]


def test_list_of_learning_rates_is_recorded_as_its_mean() -> None:
    assert listed([[0.1], [0.2, 0.4], torch.tensor([1.0, 3.0])]) == [0.1, pytest.approx(0.3), 2.0]
    assert curve("Determined/extra") == pytest.approx([0.1, 0.3, 2.0])


@pytest.mark.parametrize("value", ["text", {"a": 1.0}, object(), [[1.0], [1.0, 2.0]]], ids=lambda v: type(v).__name__)
def test_training_value_without_a_number_is_recorded_as_none_with_one_warning(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert listed([value, 1.0, value]) == [None, 1.0, None]
    assert curve("Determined/extra") == [1.0]
    (said,) = warnings_in(caplog)
    assert said.startswith("The training metric 'extra' is not a number at batch 1: [")
    assert "return numbers" in said


def test_training_metric_that_changes_its_shape_within_a_window_is_recorded_as_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert listed([[1.0, 2.0], [1.0]], reporting_period=Batch(2)) == [None]
    assert "[[1.0, 2.0], [1.0]]" in warnings_in(caplog)[0]


class ValidatedTrial(ListedTrial):
    """Returns the values of the list from `evaluate_batch`, one a batch."""

    train_batch = LineTrial.train_batch

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {**super().evaluate_batch(batch, batch_idx), "extra": self.values[batch_idx]}


@pytest.mark.parametrize(
    ("first", "second"),
    [("text", "text"), ({"a": 1.0}, {"a": 1.0}), (object(), 1.0), ([1.0, 2.0], [1.0])],
    ids=["string", "mapping", "object", "changing shape"],
)
def test_validation_value_without_a_number_is_recorded_as_none_with_one_warning(
    first: Any, second: Any, caplog: pytest.LogCaptureFixture
) -> None:
    listed([first, second], ValidatedTrial, validation_period=Batch(1))
    assert [report.metrics["extra"] for report in records().metrics(1, "validation")] == [None, None]
    (said,) = warnings_in(caplog)
    assert said.startswith("The validation metric 'extra' is not a number at batch 1: [")


@pytest.mark.parametrize(("reducer", "expected"), [("AVG", 2.5), ("SUM", 10.0), ("MAX", 4.0), ("MIN", 1.0)])
def test_validation_reducers_take_all_elements_of_lists_and_arrays(reducer: str, expected: float) -> None:
    class Trial(ValidatedTrial):
        def evaluation_reducer(self) -> pytorch.Reducer:
            return pytorch.Reducer[reducer]

    listed([[1.0, 2.0], torch.tensor([3.0, 4.0])], Trial)
    (report,) = records().metrics(1, "validation")
    assert report.metrics["extra"] == expected


def test_window_with_objects_survives_a_resume() -> None:
    class Trial(ListedTrial):
        values = [object(), "text", {"a": object()}, [1.0]]

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 1:
                self.context.set_stop_requested(True)
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Trial, max_length=Batch(4))
    fit(Trial, max_length=Batch(4), latest_checkpoint=latest_checkpoint())
    (report,) = records().metrics(2, "training")
    assert (report.steps_completed, report.metrics["extra"]) == (4, None)


def test_opposite_infinities_in_a_window_give_nan() -> None:
    (value,) = listed([math.inf, -math.inf], reporting_period=Batch(2))
    assert math.isnan(value)


def test_sum_beyond_the_largest_float_is_infinite() -> None:
    assert listed([1.7e308, 1.7e308], reporting_period=Batch(2)) == [math.inf]


@pytest.mark.parametrize("value", [*NON_FINITE, HUGE, 3], ids=lambda value: str(value)[:9])
def test_numbers_of_the_whole_validation_data_are_recorded_as_they_are(value: Any) -> None:
    scripted([{"loss": 1.0, "other": value}])()
    (report,) = records().metrics(1, "validation")
    assert repr(report.metrics["other"]) == repr(value)


def test_none_in_a_validation_counts_as_missing() -> None:
    scripted([{"loss": 1.0, "other": None}])()
    (report,) = records().metrics(1, "validation")
    assert "other" not in report.metrics


@pytest.mark.parametrize(("value", "recorded"), [("text", None), ({"a": 1}, None), ([1.0, 2.0], 1.5)], ids=str)
def test_other_values_of_the_whole_validation_data_are_recorded_as_numbers_or_none(value: Any, recorded: Any) -> None:
    scripted([{"loss": 1.0, "other": value}])()
    (report,) = records().metrics(1, "validation")
    assert report.metrics["other"] == recorded


@pytest.mark.parametrize("bad", [*NON_FINITE, HUGE, -HUGE], ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_what_is_not_finite_is_never_best(bad: Any, smaller_is_better: bool) -> None:
    values = [bad, 2.0, bad, 2.0 - smaller_is_better * 2 + 1, bad]
    assert scripted(values)(smaller_is_better=smaller_is_better) == [2, 4, 5]


@pytest.mark.parametrize("bad", [*NON_FINITE, HUGE, "text"], ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_record_never_calls_it_the_best_validation(bad: Any, smaller_is_better: bool) -> None:
    searcher = {"metric": "score", "smaller_is_better": smaller_is_better}
    with pytorch.init(exp_conf={"searcher": searcher}) as context:
        report = context.services.train.report_validation_metrics
        for step, value in enumerate([bad, 2.0, bad]):
            report(step, {"score": value})
        assert context.services.train.get_experiment_best_validation() == 2.0
    best = records().trial(1).best_validation
    assert best is not None
    assert (best.value, best.steps_completed) == (2.0, 1)


def test_core_program_reports_any_value() -> None:
    values = [*NON_FINITE, HUGE, "text", None, True]
    with core.init() as context:
        for step, value in enumerate(values):
            context.train.report_training_metrics(step, {"m": value})
    assert same([report.metrics["m"] for report in records().metrics(1, "training")], values)


# What is said


def test_warning_names_metric_and_batch_once(caplog: pytest.LogCaptureFixture) -> None:
    listed([1.0, 2.0, math.nan, math.nan, math.inf, 1.0], reporting_period=Batch(4))
    (said,) = warnings_in(caplog)
    assert said.startswith("The training metric 'extra' is nan at batch 3;")


def test_each_metric_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Trial(ListedTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return {**super().train_batch(batch, epoch_idx, batch_idx), "second": math.inf if batch_idx else 0.0}

    listed([math.nan, 1.0], Trial)
    assert [said.partition(";")[0] for said in warnings_in(caplog)] == [
        "The training metric 'extra' is nan at batch 1",
        "The training metric 'second' is inf at batch 2",
    ]


def test_validation_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    scripted([1.0, -math.inf, math.nan])()
    (said,) = warnings_in(caplog)
    assert said.startswith("The validation metric 'validation_loss' is -inf at batch 2;")


def test_reducer_in_training_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Trial(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.reducer = context.wrap_reducer(lambda _: math.nan, "reduced", for_validation=False)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.reducer.update(1)
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Trial)
    (said,) = warnings_in(caplog)
    assert said.startswith("The training metric 'reduced' is nan at batch 6;")


def test_finite_metrics_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    listed([0.0, -1.0, 1e308, 3, True, None])
    assert warnings_in(caplog) == []


def test_loss_that_diverges_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Trial(LineTrial):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) * math.nan

    trial = fit(Trial, max_length=Batch(8), validation_period=Batch(4))
    assert len(trial.seen) == 8
    assert saved_at() == [8]
    assert len(warnings_in(caplog)) == 2  # `loss` and `validation_loss`
