"""System metrics of this process and machine, sampled on a thread."""

from __future__ import annotations

import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

Report = Callable[[str, Mapping[str, float]], None]
Source = Callable[[], dict[str, dict[str, float]]]


class ProfilerContext:
    """Samples CPU, memory, disk, network and GPU, and reports averages as metric groups."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def on(self, sampling_interval: int | float = 1, samples_per_report: int = 10) -> None:
        """Start sampling every `sampling_interval` seconds; report the mean of `samples_per_report` samples."""
        _check_sampling(sampling_interval, samples_per_report)
        if self._thread is not None:
            return
        # Made here, so that their warnings are raised on the caller's thread.
        sources = [source for source in (_system_source(), _gpu_source()) if source is not None]
        if not sources:
            return
        self._stop.clear()
        args = sources, sampling_interval, samples_per_report
        self._thread = threading.Thread(target=self._sample, args=args, name="resolute-profiler", daemon=True)
        self._thread.start()

    def off(self) -> None:
        """Stop sampling and report the remaining samples; raise the error that ended the sampling, if any."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _sample(self, sources: list[Source], interval: float, samples_per_report: int) -> None:
        samples: list[dict[str, dict[str, float]]] = []
        stopped = False
        try:
            while not stopped:
                stopped = self._stop.wait(interval)
                samples.append({group: values for read in sources for group, values in read().items()})
                if stopped or len(samples) >= samples_per_report:
                    for group, names in samples[0].items():
                        means = {name: sum(s[group][name] for s in samples) / len(samples) for name in names}
                        self._report(group, means)
                    samples.clear()
        except Exception as failure:
            self._failure = failure


def _check_sampling(interval: Any, samples: Any) -> None:
    if not isinstance(interval, Real) or not 0.1 <= float(interval) < math.inf:
        raise ValueError(f"profiler.on(sampling_interval={interval!r}): use at least 0.1 seconds.")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"profiler.on(samples_per_report={samples!r}): use an int of at least 1.")


def _system_source() -> Source | None:
    """Return a reader of CPU, memory, disk and network by psutil; rates are since the last reading."""
    try:
        import psutil
    except ImportError:
        warnings.warn(
            "The profiler leaves out CPU, memory, disk and network, because psutil is not installed; "
            "`pip install psutil` adds them.",
            stacklevel=3,
        )
        return None

    def counters() -> dict[str, dict[str, float]]:
        disk, net = psutil.disk_io_counters(), psutil.net_io_counters()
        return {
            "disk": {f"disk_throughput_{name}": getattr(disk, f"{name}_bytes", 0) for name in ("read", "write")},
            "network": {f"net_throughput_{name}": getattr(net, f"bytes_{name}", 0) for name in ("sent", "recv")},
        }

    process = psutil.Process()
    process.cpu_percent()  # the first call starts the measurement
    psutil.cpu_percent()
    last, last_time = counters(), time.monotonic()

    def read() -> dict[str, dict[str, float]]:
        nonlocal last, last_time
        before, last = last, counters()
        began, last_time = last_time, time.monotonic()
        seconds = max(last_time - began, 1e-9)
        rates = {
            group: {name: (value - before[group][name]) / seconds for name, value in values.items()}
            for group, values in last.items()
        }
        cpu = {"cpu_util_simple": psutil.cpu_percent(), "process_cpu_percent": process.cpu_percent()}
        free, own = psutil.virtual_memory().available, process.memory_info().rss
        return {"cpu": cpu, "memory": {"memory_free": free / 2**30, "process_memory": own / 2**30}, **rates}

    return read


def _gpu_source() -> Source | None:
    """Return a reader of GPU load and memory by NVML, or None where there is no GPU."""
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]  # an extra
    except ImportError:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            warnings.warn(
                "The profiler leaves out GPU load and memory, because nvidia-ml-py is not installed; "
                "`pip install 'resolute[gpu]'` adds them.",
                stacklevel=3,
            )
        return None

    def read() -> dict[str, dict[str, float]]:
        values: dict[str, float] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            values[f"gpu{index}_util"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            values[f"gpu{index}_free_memory"] = pynvml.nvmlDeviceGetMemoryInfo(handle).free / 2**30
        return {"gpu": values}

    try:
        pynvml.nvmlInit()
        return read if read()["gpu"] else None  # one reading to try it: the parts of a divided GPU report no load
    except pynvml.NVMLError:
        return None
