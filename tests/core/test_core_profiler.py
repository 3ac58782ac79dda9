"""core_context.profiler: system metrics in the record."""

from __future__ import annotations

import pathlib
import sqlite3
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from determined import core, errors, tracking
from determined._home import home

OnlyTrial = Callable[[], tracking.TrialRecord]


def profiler_threads() -> int:
    return sum(thread.name == "resolute-profiler" for thread in threading.enumerate())


def test_system_metrics_are_recorded_by_group(records: tracking.TrackingReader, only_trial: OnlyTrial) -> None:
    with core.init() as context:
        context.steps_completed = 7
        context.profiler.on(sampling_interval=0.1)
        context.profiler.off()
    reports = {report.group: report for report in records.metrics(only_trial().id)}
    assert {"cpu", "memory", "disk", "network"} <= reports.keys()
    assert {report.steps_completed for report in reports.values()} == {7}
    assert reports["memory"].metrics["process_memory"] > 0


def test_samples_are_reported_while_it_runs(records: tracking.TrackingReader, only_trial: OnlyTrial) -> None:
    with core.init() as context:
        context.profiler.on(sampling_interval=0.1, samples_per_report=1)
        sampled = threading.Event()
        while not sampled.wait(0.05):
            context.flush()
            if len(records.metrics(only_trial().id, "cpu")) >= 2:
                sampled.set()
        context.profiler.off()


def test_on_twice_samples_once() -> None:
    with core.init() as context:
        context.profiler.on()
        context.profiler.on()
        assert profiler_threads() == 1
    assert profiler_threads() == 0


def test_off_twice_is_fine() -> None:
    with core.init() as context:
        context.profiler.off()
        context.profiler.on()
        context.profiler.off()
        context.profiler.off()
        assert profiler_threads() == 0


def test_it_can_be_switched_on_again(records: tracking.TrackingReader, only_trial: OnlyTrial) -> None:
    with core.init() as context:
        for _ in range(2):
            context.profiler.on()
            context.profiler.off()
    assert len(records.metrics(only_trial().id, "cpu")) == 2


@pytest.mark.parametrize("interval", [0, 0.05, -1, float("nan"), float("inf"), "1", None])
def test_interval_that_is_too_short_or_none_is_refused(interval: Any) -> None:
    with core.init() as context, pytest.raises(ValueError, match="sampling_interval="):
        context.profiler.on(sampling_interval=interval)
    assert profiler_threads() == 0


@pytest.mark.parametrize("samples", [0, -1, 1.5, "1", None, True])
def test_count_of_samples_that_is_none_is_refused(samples: Any) -> None:
    with core.init() as context, pytest.raises(ValueError, match="samples_per_report="):
        context.profiler.on(samples_per_report=samples)


def break_metrics(database: pathlib.Path) -> None:
    connection = sqlite3.connect(database)
    connection.execute("ALTER TABLE metrics RENAME TO aside")
    connection.commit()
    connection.close()


def test_failure_of_its_reports_is_not_lost() -> None:
    def run() -> None:
        with core.init() as context:
            context.flush()
            break_metrics(home().database)
            context.profiler.on(sampling_interval=0.1, samples_per_report=1)
            context.profiler.off()

    with pytest.raises(errors.TrackingException, match="reports of this run are not in"):
        run()


class Nvml(types.ModuleType):
    """Answers as NVIDIA's library does on a machine with two GPUs."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, knows_load: bool = True) -> None:
        super().__init__("pynvml")
        self._knows_load = knows_load

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if not self._knows_load:
            raise self.NVMLError("Not Supported")
        return types.SimpleNamespace(gpu=50 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(free=(handle + 1) * 2**30)


def profile_once() -> None:
    with core.init() as context:
        context.profiler.on()
        context.profiler.off()


def test_gpus_are_recorded(
    monkeypatch: pytest.MonkeyPatch, records: tracking.TrackingReader, only_trial: OnlyTrial
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    profile_once()
    (report,) = records.metrics(only_trial().id, "gpu")
    assert report.metrics == {
        "gpu0_util": 50,
        "gpu0_free_memory": 1,
        "gpu1_util": 51,
        "gpu1_free_memory": 2,
    }


def test_gpus_that_tell_nothing_are_left_out(
    monkeypatch: pytest.MonkeyPatch, records: tracking.TrackingReader, only_trial: OnlyTrial
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(knows_load=False))
    profile_once()
    groups = {report.group for report in records.metrics(only_trial().id)}
    assert groups == {"cpu", "memory", "disk", "network"}
