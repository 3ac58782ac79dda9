"""core_context.train: reports reach the record and TensorBoard, and wrong ones are refused at the call."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import determined as det
from determined import core, tracking

OnlyTrial = Callable[[], tracking.TrialRecord]
ReadCurves = Callable[[pathlib.Path], dict[str, list[tuple[int, float]]]]
Report = Callable[[core.TrainContext], None]


def run(*reports: Report, **options: Any) -> pathlib.Path:
    """Make the reports in a run of their own; returns its TensorBoard folder."""
    with core.init(**options) as context:
        for report in reports:
            report(context.train)
        return context.train.get_tensorboard_path()


@pytest.mark.parametrize(
    ("report", "group"),
    [
        (lambda train: train.report_training_metrics(7, {"loss": 0.5}), "training"),
        (lambda train: train.report_validation_metrics(7, {"loss": 0.5}), "validation"),
        (lambda train: train.report_metrics("inference", 7, {"loss": 0.5}), "inference"),
    ],
)
def test_metrics_are_recorded_by_group_and_step(
    report: Report, group: str, records: tracking.TrackingReader, only_trial: OnlyTrial
) -> None:
    run(report)
    (recorded,) = records.metrics(only_trial().id)
    assert (recorded.group, recorded.steps_completed, recorded.metrics) == (group, 7, {"loss": 0.5})


def test_training_metrics_without_batches_make_curves(read_curves: ReadCurves) -> None:
    folder = run(
        lambda train: train.report_training_metrics(10, {"loss": 0.5}),
        lambda train: train.report_training_metrics(20, {"loss": 0.25}),
    )
    assert read_curves(folder) == {"Determined/loss": [(10, 0.5), (20, 0.25)]}


def test_batch_metrics_make_curves_that_end_at_the_reported_step(read_curves: ReadCurves) -> None:
    batches = [{"loss": 3.0}, {"loss": 2.0}, {"loss": 1.0}]
    folder = run(lambda train: train.report_training_metrics(10, {"loss": 2.0}, batches))
    assert read_curves(folder) == {"Determined/loss": [(8, 3.0), (9, 2.0), (10, 1.0)]}


def test_metrics_of_the_window_alone_stand_beside_those_of_batches(read_curves: ReadCurves) -> None:
    folder = run(
        lambda train: train.report_training_metrics(2, {"loss": 2.0, "auc": 0.5}, [{"loss": 3.0}, {"loss": 1.0}])
    )
    assert read_curves(folder) == {"Determined/loss": [(1, 3.0), (2, 1.0)], "Determined/auc": [(2, 0.5)]}


def test_more_batches_than_steps_are_accepted(read_curves: ReadCurves) -> None:
    folder = run(lambda train: train.report_training_metrics(1, {"loss": 2.0}, [{"loss": v} for v in (3.0, 2.0, 1.0)]))
    assert read_curves(folder) == {"Determined/loss": [(0, 3.0), (0, 2.0), (1, 1.0)]}


def test_validation_curves_have_a_prefix_once(read_curves: ReadCurves) -> None:
    folder = run(lambda train: train.report_validation_metrics(4, {"loss": 1.0, "val_acc": 0.5, "validation_f1": 0.25}))
    assert read_curves(folder) == {
        "Determined/val_loss": [(4, 1.0)],
        "Determined/val_acc": [(4, 0.5)],
        "Determined/validation_f1": [(4, 0.25)],
    }


def test_other_groups_make_no_curves(read_curves: ReadCurves) -> None:
    assert read_curves(run(lambda train: train.report_metrics("inference", 1, {"loss": 1.0}))) == {}


def test_manual_mode_makes_no_curves(read_curves: ReadCurves) -> None:
    folder = run(
        lambda train: train.report_training_metrics(1, {"loss": 1.0}), tensorboard_mode=core.TensorboardMode.MANUAL
    )
    assert read_curves(folder) == {}


def test_what_is_no_number_is_recorded_and_has_no_curve(
    read_curves: ReadCurves, records: tracking.TrackingReader, only_trial: OnlyTrial
) -> None:
    metrics = {"loss": 1.0, "note": "odd", "matrix": [[1, 2], [3, 4]], "none": None}
    folder = run(lambda train: train.report_training_metrics(1, metrics))
    assert read_curves(folder) == {"Determined/loss": [(1, 1.0)]}
    assert records.metrics(only_trial().id)[0].metrics == metrics


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), np.float64(0.5)])
def test_numpy_scalars_are_numbers(
    value: Any, read_curves: ReadCurves, records: tracking.TrackingReader, only_trial: OnlyTrial
) -> None:
    folder = run(lambda train: train.report_training_metrics(np.int64(1), {"loss": value}))
    assert read_curves(folder) == {"Determined/loss": [(1, 0.5)]}
    assert records.metrics(only_trial().id)[0].metrics == {"loss": 0.5}


def test_torch_scalars_are_numbers(read_curves: ReadCurves) -> None:
    import torch

    loss = torch.tensor(0.5, requires_grad=True)
    folder = run(lambda train: train.report_training_metrics(1, {"loss": loss}, [{"loss": loss}]))
    assert read_curves(folder) == {"Determined/loss": [(1, 0.5)]}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_metrics_are_recorded(value: float, records: tracking.TrackingReader, only_trial: OnlyTrial) -> None:
    run(lambda train: train.report_training_metrics(1, {"loss": value}))
    recorded = records.metrics(only_trial().id)[0].metrics["loss"]
    assert recorded == value or (math.isnan(recorded) and math.isnan(value))


def test_what_the_program_changes_after_a_report_is_not_reported(
    read_curves: ReadCurves, records: tracking.TrackingReader, only_trial: OnlyTrial
) -> None:
    total, history = np.array(1.0), [1, 2]
    metrics: dict[str, Any] = {"total": total, "history": history}
    batches = [{"loss": 1.0}]

    def report(train: core.TrainContext) -> None:
        train.report_training_metrics(1, metrics, batches)
        total.fill(9.0)
        history.clear()
        metrics.clear()
        batches[0]["loss"] = 9.0
        batches.clear()

    curves = read_curves(run(report))
    assert records.metrics(only_trial().id)[0].metrics == {"total": 1.0, "history": [1, 2]}
    assert curves == {"Determined/loss": [(1, 1.0)], "Determined/total": [(1, 1.0)]}


def test_negative_steps_are_recorded_as_0_with_a_warning(
    only_trial: OnlyTrial, records: tracking.TrackingReader
) -> None:
    with pytest.warns(UserWarning, match=r"steps_completed=-1 is recorded as 0"):
        run(lambda train: train.report_training_metrics(-1, {"loss": 1.0}))
    assert records.metrics(only_trial().id)[0].steps_completed == 0


@pytest.mark.parametrize("steps", [1.5, "1", None, True])
@pytest.mark.parametrize("call", ["report_training_metrics", "report_validation_metrics"])
def test_steps_that_are_no_count_are_refused(call: str, steps: Any) -> None:
    with core.init() as context, pytest.raises(ValueError, match="steps_completed="):
        getattr(context.train, call)(steps, {"loss": 1.0})


@pytest.mark.parametrize("metrics", [None, 0.5, ["loss"], {1: 0.5}])
@pytest.mark.parametrize("call", ["report_training_metrics", "report_validation_metrics"])
def test_metrics_that_are_no_dict_are_refused(call: str, metrics: Any) -> None:
    with core.init() as context, pytest.raises(TypeError, match="must be a dict"):
        getattr(context.train, call)(1, metrics)


def test_batch_metrics_that_are_no_dicts_are_refused() -> None:
    with core.init() as context, pytest.raises(TypeError, match="batch metrics"):
        context.train.report_training_metrics(1, {"loss": 1.0}, [0.5])  # type: ignore[list-item]


def test_refused_report_is_not_recorded(records: tracking.TrackingReader, only_trial: OnlyTrial) -> None:
    with core.init() as context, pytest.raises(TypeError):
        context.train.report_training_metrics(1, {"loss": 1.0}, [0.5])  # type: ignore[list-item]
    assert records.metrics(only_trial().id) == []


@pytest.mark.parametrize("group", [None, 5, ""])
def test_group_without_a_name_is_refused(group: Any) -> None:
    with core.init() as context, pytest.raises(TypeError, match="group="):
        context.train.report_metrics(group, 1, {"loss": 1.0})


@pytest.mark.parametrize("progress", [0, 0.5, 1, np.float32(0.5)])
def test_progress_is_recorded(progress: float, only_trial: OnlyTrial) -> None:
    run(lambda train: train.report_progress(progress))
    assert only_trial().progress == progress


@pytest.mark.parametrize(("progress", "recorded"), [(-0.1, 0), (1.1, 1), (math.inf, 1)])
def test_progress_out_of_range_is_recorded_as_the_end_of_it_with_a_warning(
    progress: float, recorded: float, only_trial: OnlyTrial
) -> None:
    with pytest.warns(UserWarning, match=rf"report_progress\({progress}\) is recorded as {recorded}"):
        run(lambda train: train.report_progress(progress))
    assert only_trial().progress == recorded


@pytest.mark.parametrize("progress", [math.nan, "half", None])
def test_progress_that_is_no_number_is_refused(progress: Any) -> None:
    with core.init() as context, pytest.raises(ValueError, match="from 0 to 1"):
        context.train.report_progress(progress)


@pytest.mark.parametrize("reason", core.EarlyExitReason)
def test_early_exit_is_recorded(reason: core.EarlyExitReason, only_trial: OnlyTrial) -> None:
    run(lambda train: train.report_early_exit(reason))
    assert only_trial().status == reason.value


def test_early_exit_for_another_reason_is_refused() -> None:
    with core.init() as context, pytest.raises(TypeError, match="EarlyExitReason"):
        context.train.report_early_exit("tired")  # type: ignore[arg-type]


def test_status_is_recorded(only_trial: OnlyTrial) -> None:
    run(lambda train: train.set_status("warming up"))
    assert only_trial().status == "warming up"


def test_metadata_is_recorded(only_trial: OnlyTrial) -> None:
    run(lambda train: train.set_metadata({"a": {"b": [1, 2]}}))
    assert only_trial().metadata == {"a": {"b": [1, 2]}}


def test_metadata_is_replaced() -> None:
    with core.init() as context:
        context.train.set_metadata({"a": 1})
        context.train.set_metadata({"b": 2})
        assert context.train.get_metadata() == {"b": 2}


def test_there_is_no_metadata_at_first() -> None:
    with core.init() as context:
        assert context.train.get_metadata() == {}


def test_metadata_is_apart_from_the_programs_objects(only_trial: OnlyTrial) -> None:
    mine = {"inner": [1]}
    with core.init() as context:
        context.train.set_metadata(mine)
        mine["inner"].append(2)
        context.train.get_metadata()["inner"].append(3)
        assert context.train.get_metadata() == {"inner": [1]}
    assert only_trial().metadata == {"inner": [1]}


@pytest.mark.parametrize(("metadata", "kind"), [("text", TypeError), ([1], TypeError), ({"a": object()}, ValueError)])
def test_metadata_that_is_no_json_is_refused(metadata: Any, kind: type[Exception]) -> None:
    with core.init() as context, pytest.raises(kind, match="trial metadata"):
        context.train.set_metadata(metadata)


def test_tensorboard_path_exists() -> None:
    with core.init() as context:
        assert context.train.get_tensorboard_path().is_dir()


def test_tensorboard_files_can_be_uploaded_by_old_programs(read_curves: ReadCurves) -> None:
    with core.init() as context:
        context.train.report_training_metrics(1, {"loss": 1.0})
        context.train.upload_tensorboard_files(lambda path: True, lambda path, rank: path)
        # Written already, while the run still goes on.
        assert read_curves(context.train.get_tensorboard_path()) == {"Determined/loss": [(1, 1.0)]}


def test_one_event_file_whoever_asks_first() -> None:
    with core.init() as context:
        context.train.report_training_metrics(1, {"loss": 1.0})
        assert context.scalars.file is context.scalars.file
        folder = context.train.get_tensorboard_path()
    assert len(list(folder.iterdir())) == 1


def test_local_run_without_a_searcher_has_no_best_validation() -> None:
    with core.init() as context:
        context.train.report_validation_metrics(1, {"loss": 1.0})
        assert context.train.get_experiment_best_validation() is None


@pytest.mark.parametrize(("smaller_is_better", "best"), [(True, 0.25), (False, 0.75)])
def test_best_validation_is_by_the_searchers_metric(
    smaller_is_better: bool, best: float, managed: Callable[..., det.ClusterInfo]
) -> None:
    managed({"searcher": {"metric": "score", "smaller_is_better": smaller_is_better}})
    with core.init() as context:
        assert context.train.get_experiment_best_validation() is None
        for step, score in enumerate([0.5, 0.25, 0.75], start=1):
            context.train.report_validation_metrics(step, {"score": score, "other": -5.0})
        assert context.train.get_experiment_best_validation() == best


def test_a_validation_that_a_search_waits_for_is_on_record_at_once(
    managed: Callable[..., det.ClusterInfo], records: tracking.TrackingReader
) -> None:
    info = managed({"searcher": {"metric": "score"}})
    delays = []
    with core.init() as context:
        for step in range(1, 6):
            context.train.report_validation_metrics(step, {"score": 0.5})
            reported = time.monotonic()
            while len(records.metrics(info.trial.trial_id, "validation")) < step:
                time.sleep(0.01)
            delays.append(time.monotonic() - reported)
    # Other reports gather for a second, except the first, which goes with the opening of the record. However busy the
    # machine is, one of the others gets through sooner.
    assert min(delays[1:]) < 0.8
