"""Profiling: system metrics and timings of the loop, and torch's profiler over the run."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from determined import pytorch
from determined._home import home
from determined.pytorch import Batch
from trials import LineTrial, fit, records, trainer

SYSTEM_GROUPS = {"cpu", "memory", "disk", "network"}
STAGES = {"data_fetch_ms", "to_device_ms", "train_batch_ms"}


def groups() -> set[str]:
    return {report.group for report in records().metrics(1)}


def timings() -> list[tuple[int, set[str]]]:
    """The reports of the group `timing`: batches trained, and the names in it."""
    return [(report.steps_completed, set(report.metrics)) for report in records().metrics(1, "timing")]


def profiled(length: int = 6, period: int = 1, **settings: Any) -> None:
    with trainer() as (its_trainer, _):
        its_trainer.configure_profiler(**settings)
        its_trainer.fit(max_length=Batch(length), reporting_period=Batch(period), checkpoint_policy="none")


def test_nothing_is_collected_unless_asked_for() -> None:
    fit()
    assert groups() == {"training", "validation"}


def test_system_metrics_are_groups_of_their_own() -> None:
    profiled(enabled=True)
    assert groups() >= SYSTEM_GROUPS | {"timing"}


def test_fit_can_switch_it_on() -> None:
    fit(profiling_enabled=True)
    assert groups() >= SYSTEM_GROUPS | {"timing"}


def test_fit_switches_on_what_was_configured() -> None:
    with trainer() as (its_trainer, _):
        its_trainer.configure_profiler(begin_on_batch=2, end_after_batch=3)
        its_trainer.fit(max_length=Batch(6), reporting_period=Batch(1), profiling_enabled=True)
    assert [step for step, names in timings() if names >= STAGES] == [3, 4]


def test_every_stage_of_every_batch_is_timed() -> None:
    profiled(length=3, enabled=True)
    batches = {step: names for step, names in timings() if names >= STAGES}
    assert list(batches) == [1, 2, 3]


def test_timings_are_positive_milliseconds() -> None:
    profiled(enabled=True)
    values = [value for report in records().metrics(1, "timing") for value in report.metrics.values()]
    assert all(0 < value < 60_000 for value in values)


def test_timing_covers_the_batches_from_begin_to_end_alone() -> None:
    profiled(enabled=True, begin_on_batch=2, end_after_batch=3)
    assert [step for step, names in timings() if names >= STAGES] == [3, 4]


def test_timing_of_one_batch_within_a_window() -> None:
    profiled(period=100, enabled=True, begin_on_batch=2, end_after_batch=2)
    assert [step for step, names in timings() if names >= STAGES] == [6]


def test_timing_that_would_begin_after_the_run_does_not() -> None:
    profiled(enabled=True, begin_on_batch=100)
    assert groups() == {"training", "validation"}


def test_the_last_validation_and_checkpoint_are_timed() -> None:
    profiled(enabled=True)
    assert {"validation_ms", "checkpoint_ms"} <= set().union(*(names for _, names in timings()))


def test_the_last_call_wins() -> None:
    with trainer() as (its_trainer, _):
        its_trainer.configure_profiler(enabled=True)
        its_trainer.configure_profiler(enabled=False)
        its_trainer.fit(max_length=Batch(2), checkpoint_policy="none")
    assert groups() == {"training", "validation"}


def test_timing_changes_nothing_about_training() -> None:
    weights = []
    for enabled in (True, False):
        weights.append(fit(profiling_enabled=enabled).model.weight.detach())
    assert torch.equal(*weights)


# torch.profiler


class StepCounter:
    """A schedule for torch's profiler that keeps the steps it was asked about."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, step: int) -> torch.profiler.ProfilerAction:
        self.steps.append(step)
        return torch.profiler.ProfilerAction.NONE


def torch_profiled(**settings: Any) -> type[LineTrial]:
    class Profiled(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.set_profiler(**settings)

    return Profiled


def test_torch_profiler_steps_once_a_batch() -> None:
    counter = StepCounter()
    fit(torch_profiled(schedule=counter), max_length=Batch(4), validation_period=Batch(2))
    assert counter.steps == [0, 1, 2, 3, 4]


def test_torch_profiler_writes_traces_to_the_tensorboard_folder() -> None:
    settings = {
        "activities": [torch.profiler.ProfilerActivity.CPU],
        "schedule": torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        "acc_events": True,
    }
    fit(torch_profiled(**settings), max_length=Batch(3))
    (trace,) = home().tensorboard(1, 1).glob("*.pt.trace.json")
    assert json.loads(trace.read_text())["traceEvents"]


def test_own_trace_handler_goes_before_ours() -> None:
    ready = []
    settings = {
        "activities": [torch.profiler.ProfilerActivity.CPU],
        "schedule": torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        "on_trace_ready": ready.append,
        "acc_events": True,
    }
    fit(torch_profiled(**settings), max_length=Batch(2))
    assert len(ready) == 1
    assert list(home().tensorboard(1, 1).glob("*.pt.trace.json")) == []


def test_torch_profiler_ends_with_an_exception() -> None:
    counter = StepCounter()

    class Failing(torch_profiled(schedule=counter)):  # type: ignore[misc]
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ZeroDivisionError
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytest.raises(ZeroDivisionError):
        fit(Failing)
    assert counter.steps == [0, 1]
    fit(torch_profiled(schedule=StepCounter()), max_length=Batch(1))


# Where the time went


class SlowData(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return torch.full((4,), float(index)), torch.ones(1)


class SlowTrial(LineTrial):
    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(SlowData(), batch_size=4)


def test_summary_says_where_the_time_went_and_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    fit(SlowTrial, max_length=Batch(12), validation_period=Batch(6), profiling_enabled=True)
    output = capsys.readouterr().out
    summary = next(line for line in output.splitlines() if "went into:" in line)
    shares = {name: int(share) for name, share in re.findall(r"(data|training|validation|the rest) (\d+)%", summary)}
    assert shares.keys() == {"data", "training", "validation", "the rest"}
    assert shares["data"] > 30
    assert "give the training DataLoader more num_workers" in output


def test_data_that_is_fast_enough_is_not_complained_of(capsys: pytest.CaptureFixture[str]) -> None:
    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            time.sleep(0.01)
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Trial, max_length=Batch(6), profiling_enabled=True)
    output = capsys.readouterr().out
    assert "went into:" in output
    assert "num_workers" not in output


def test_there_is_no_summary_without_profiling(capsys: pytest.CaptureFixture[str]) -> None:
    fit(max_length=Batch(3))
    assert "went into" not in capsys.readouterr().out
