"""What is on record after a run, and in its TensorBoard files."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import determined as det
from determined import core, pytorch, tracking
from determined._home import home
from determined.pytorch import Batch
from trials import SEED, LineTrial, fit, latest_checkpoint, records, scripted


def test_record_holds_hparams_seed_versions_and_name() -> None:
    config = {"name": "my run", "reproducibility": {"experiment_seed": 123}}
    fit(init={"hparams": {"lr": 0.1}, "exp_conf": config}, max_length=Batch(1))
    experiment, (trial,) = records().experiment(1), records().trials(1)
    assert (experiment.name, experiment.config, experiment.state) == ("my run", config, tracking.RunState.COMPLETED)
    assert (trial.hparams, trial.seed) == ({"lr": 0.1}, 123)
    assert (trial.torch_version, trial.resolute_version) == (torch.__version__, det.__version__)
    assert trial.progress == 1.0


def test_a_run_without_a_seed_records_the_one_it_took() -> None:
    with pytorch.init() as context:
        seed = context.get_trial_seed()
    assert records().trial(1).seed == seed


def test_training_metrics_are_averages_of_the_window_with_batches_and_epochs() -> None:
    class Counting(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return {"loss": super().train_batch(batch, epoch_idx, batch_idx)["loss"], "idx": batch_idx}

    fit(Counting, max_length=Batch(8), reporting_period=Batch(4))
    reports = [report.metrics for report in records().metrics(1, "training")]
    assert [(m["idx"], m["batches"], m["epochs"]) for m in reports] == [(1.5, 4, 0), (5.5, 8, 1)]


def test_validation_metrics_carry_batches_and_epochs() -> None:
    fit(max_length=Batch(6))
    (report,) = records().metrics(1, "validation")
    assert (report.metrics["batches"], report.metrics["epochs"]) == (6, 1)


def test_metrics_of_the_trial_named_batches_and_epochs_are_left_alone() -> None:
    scripted([{"validation_loss": 1.0, "batches": -1.0, "epochs": -2.0}])()
    (report,) = records().metrics(1, "validation")
    assert (report.metrics["batches"], report.metrics["epochs"]) == (-1.0, -2.0)


def test_workload_end_sees_averages_and_batches_of_its_window() -> None:
    seen: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []

    class Listener(pytorch.PyTorchCallback):
        def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
            seen.append((avg_metrics, batch_metrics))

    class Listening(LineTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"listener": Listener()}

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            super().train_batch(batch, epoch_idx, batch_idx)
            return {"idx": float(batch_idx)}

    fit(Listening, max_length=Batch(5), reporting_period=Batch(100), validation_period=Batch(2))
    assert [[b["idx"] for b in batches] for _, batches in seen] == [[0, 1], [2, 3], [4]]
    assert [average["idx"] for average, _ in seen] == [0.5, 2.5, 4.0]
    assert [(average["batches"], average["epochs"]) for average, _ in seen] == [(2, 0), (4, 0), (5, 0)]


class Hearing(pytorch.PyTorchCallback):
    """Notes the metrics of each hook, and keeps the best loss in its state."""

    def __init__(self) -> None:
        self.heard: dict[str, Any] = {}
        self.best = float("inf")

    def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
        self.heard |= {"averages": avg_metrics, "batch": batch_metrics[0]}

    def on_validation_epoch_end(self, outputs: Any) -> None:
        self.heard["output"] = outputs[0]

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.heard["validation"] = metrics
        self.best = min(self.best, metrics["validation_loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class HeardTrial(LineTrial):
    """Two batches, and metrics that are tensors and plain numbers."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.hearing = Hearing()
        self.count = context.wrap_reducer(len, "count", for_training=False)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"hearing": self.hearing}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return {**super().train_batch(batch, epoch_idx, batch_idx), "idx": batch_idx}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.count.update(1)
        return super().evaluate_batch(batch, batch_idx)


def test_validation_end_gets_the_metrics_of_the_trial_and_its_reducers_alone() -> None:
    assert fit(HeardTrial).hearing.heard["validation"].keys() == {"validation_loss", "count"}


def test_numbers_that_callbacks_get_offer_what_numpy_scalars_do() -> None:
    heard = fit(HeardTrial, max_length=Batch(2)).hearing.heard
    assert heard["averages"]["loss"].item() > 0
    assert [heard["batch"][name].item() for name in ("loss", "idx")] == [heard["batch"]["loss"], 0]
    assert heard["output"]["validation_loss"].item() > 0
    assert heard["validation"]["count"].item() == 2


def test_a_callback_can_keep_a_metric_that_it_got_in_its_state() -> None:
    best = fit(HeardTrial, max_length=Batch(1)).hearing.best
    trial = fit(HeardTrial, max_length=Batch(1), latest_checkpoint=latest_checkpoint())
    assert trial.hearing.best == best


def test_a_bare_tensor_is_the_loss() -> None:
    class Bare(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return super().train_batch(batch, epoch_idx, batch_idx)["loss"]

    fit(Bare, max_length=Batch(1))
    (report,) = records().metrics(1, "training")
    assert report.metrics["loss"] > 0


def test_training_reducers_report_with_the_window() -> None:
    class Reducing(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.largest = context.wrap_reducer(max, "largest", for_validation=False)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.largest.update(batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Reducing, max_length=Batch(4), reporting_period=Batch(2))
    assert [report.metrics["largest"] for report in records().metrics(1, "training")] == [1, 3]


def test_a_continued_run_names_its_source() -> None:
    fit(max_length=Batch(2))
    source = latest_checkpoint()
    fit(max_length=Batch(3), latest_checkpoint=source)
    trial = records().trial(2)
    assert (trial.source_checkpoint, trial.source_steps_completed) == (source, 2)


def test_latest_checkpoint_can_be_a_path() -> None:
    fit(max_length=Batch(2))
    path = pathlib.Path(records().checkpoints()[-1].path)
    assert fit(max_length=Batch(3), latest_checkpoint=path).seen == [(0, 2)]


def test_latest_checkpoint_of_the_environment_continues_a_local_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fit(max_length=Batch(2))
    monkeypatch.setenv("DET_LATEST_CHECKPOINT", latest_checkpoint())
    assert fit(max_length=Batch(3)).seen == [(0, 2)]


# TensorBoard


def curves(trial_id: int = 1) -> dict[str, list[int]]:
    """The steps of each scalar in the trial's TensorBoard files."""
    events = EventAccumulator(str(home().tensorboard(1, trial_id)), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_batch_and_validation_is_a_point_of_a_curve() -> None:
    fit(max_length=Batch(5), validation_period=Batch(2))
    written = curves()
    assert written["Determined/loss"] == [1, 2, 3, 4, 5]
    assert written["Determined/validation_loss"] == [2, 4, 5]


def test_validation_names_get_a_prefix_unless_they_have_one() -> None:
    scripted([{"validation_loss": 1.0, "val_a": 2.0, "accuracy": 3.0}])()
    assert {"Determined/validation_loss", "Determined/val_a", "Determined/val_accuracy"} <= set(curves())


def test_init_can_switch_tensorboard_off() -> None:
    fit(init={"enable_tensorboard_logging": False})
    assert not home().tensorboard(1, 1).exists()


def test_the_trial_can_switch_tensorboard_off() -> None:
    class Quiet(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.set_enable_tensorboard_logging(False)

    fit(Quiet)
    assert not home().tensorboard(1, 1).exists()


def test_core_reports_its_own_groups_beside_the_loops() -> None:
    class Reporting(LineTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            services: core.Context = self.context.services

            class Listener(pytorch.PyTorchCallback):
                def on_validation_end(self, metrics: dict[str, Any]) -> None:
                    services.train.report_metrics("own", 1, {"x": 2.0})

            return {"listener": Listener()}

    fit(Reporting, max_length=Batch(1))
    assert [report.metrics for report in records().metrics(1, "own")] == [{"x": 2.0}]


def test_runs_without_a_seed_in_one_process_get_seeds_of_their_own() -> None:
    with pytorch.init(exp_conf=SEED), pytorch.init() as first, pytorch.init() as second:
        assert first.get_trial_seed() != second.get_trial_seed()
