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
        # Made here, so that what they warn about is the business of the caller's thread.
        sources = [source for source in (_system_source(), _gpu_source()) if source is not None]
        if not sources:
            return
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._sample,
            args=(sources, sampling_interval, samples_per_report),
            name="resolute-profiler",
            daemon=True,
        )
        self._thread.start()

    def off(self) -> None:
        """Stop sampling and report what was gathered; raises what ended the sampling before, if anything did."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _sample(self, sources: list[Source], interval: float, samples_per_report: int) -> None:
        try:
            self._report_means(sources, interval, samples_per_report)
        except Exception as failure:
            self._failure = failure

    def _report_means(self, sources: list[Source], interval: float, samples_per_report: int) -> None:
        samples: list[dict[str, dict[str, float]]] = []
        stopped = False
        while not stopped:
            stopped = self._stop.wait(interval)
            samples.append({group: values for read in sources for group, values in read().items()})
            if stopped or len(samples) >= samples_per_report:
                for group, values in _means(samples).items():
                    self._report(group, values)
                samples.clear()


def _check_sampling(interval: Any, samples: Any) -> None:
    if not isinstance(interval, Real) or not 0.1 <= float(interval) < math.inf:
        raise ValueError(f"profiler.on(sampling_interval={interval!r}): use at least 0.1 seconds.")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"profiler.on(samples_per_report={samples!r}): use an int of at least 1.")


class _SystemSource:
    """CPU, memory, disk and network by psutil; rates since the reading before."""

    def __init__(self) -> None:
        import psutil

        self._psutil: Any = psutil
        self._process: Any = psutil.Process()
        self._process.cpu_percent()
        psutil.cpu_percent()
        self._counters = self._read_counters()
        self._time = time.monotonic()

    def read(self) -> dict[str, dict[str, float]]:
        before, self._counters = self._counters, self._read_counters()
        last, self._time = self._time, time.monotonic()
        seconds = max(self._time - last, 1e-9)
        rates = {name: (self._counters[name] - before[name]) / seconds for name in before}
        memory = self._psutil.virtual_memory()
        return {
            "cpu": {
                "cpu_util_simple": self._psutil.cpu_percent(),
                "process_cpu_percent": self._process.cpu_percent(),
            },
            "memory": {
                "memory_free": memory.available / 2**30,
                "process_memory": self._process.memory_info().rss / 2**30,
            },
            "disk": {name: rates[name] for name in rates if name.startswith("disk")},
            "network": {name: rates[name] for name in rates if name.startswith("net")},
        }

    def _read_counters(self) -> dict[str, float]:
        disk, net = self._psutil.disk_io_counters(), self._psutil.net_io_counters()
        return {
            "disk_throughput_read": disk.read_bytes if disk else 0,
            "disk_throughput_write": disk.write_bytes if disk else 0,
            "net_throughput_sent": net.bytes_sent if net else 0,
            "net_throughput_recv": net.bytes_recv if net else 0,
        }


def _system_source() -> Source | None:
    try:
        return _SystemSource().read
    except ImportError:
        warnings.warn(
            "The profiler leaves out CPU, memory, disk and network, because psutil is not installed; "
            "`pip install psutil` adds them.",
            stacklevel=3,
        )
        return None


def _gpu_source() -> Source | None:
    """Return a reader of GPU load and memory by NVML, or None where there is no GPU."""
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]  # an extra
    except ImportError:
        _say_that_nvml_is_missing()
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
        # Read once: parts of a GPU that was divided have no load to tell.
        return read if read()["gpu"] else None
    except pynvml.NVMLError:
        return None


def _say_that_nvml_is_missing() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        warnings.warn(
            "The profiler leaves out GPU load and memory, because nvidia-ml-py is not installed; "
            "`pip install 'resolute[gpu]'` adds them.",
            stacklevel=4,
        )


def _means(samples: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        group: {name: sum(s[group][name] for s in samples) / len(samples) for name in names}
        for group, names in samples[0].items()
    }
