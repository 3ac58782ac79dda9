"""Timings of the loop's stages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from determined import core

F = TypeVar("F", bound=Callable[..., Any])

STAGES = {
    "data_fetch": "data",
    "to_device": "transfer",
    "train_batch": "training",
    "metrics": "metrics",
    "validation": "validation",
    "checkpoint": "checkpoints",
}
"""The stages of the loop: the names of their recorded times, and their names in the summary."""

MAX_DATA_SHARE = 0.3
"""The share of time spent waiting for data from which the summary advises faster loading."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProfilerSettings:
    """The arguments of `Trainer.configure_profiler`."""

    sync_timings: bool = True
    enabled: bool = False
    begin_on_batch: int = 0
    end_after_batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("sync_timings", "enabled"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"configure_profiler({name}={getattr(self, name)!r}): pass True or False.")
        _check_batch("begin_on_batch", self.begin_on_batch)
        if self.end_after_batch is not None:
            _check_batch("end_after_batch", self.end_after_batch)
            if self.end_after_batch < self.begin_on_batch:
                raise ValueError(
                    f"configure_profiler(begin_on_batch={self.begin_on_batch}, end_after_batch="
                    f"{self.end_after_batch}) ends before it begins; use a later end, or None for the whole run."
                )


class Timings:
    """Measures system metrics and the times of the loop's stages, between two batches of the run."""

    def __init__(self, settings: ProfilerSettings, profiler: core.ProfilerContext, device: torch.device) -> None:
        self._enabled = settings.enabled
        self._begin = settings.begin_on_batch
        self._end = None if settings.end_after_batch is None else settings.end_after_batch + 1
        self._profiler = profiler
        self._synchronizes = settings.sync_timings and device.type == "cuda"
        self._seconds: dict[str, list[float]] = {}
        self._per_stage: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._on = False
        self._since = 0.0
        self._total = 0.0

    def next_change(self, batches_trained: int) -> int | None:
        """Return the number of batches at which timing next begins or ends."""
        later = [batch for batch in (self._begin, self._end) if batch is not None and batch > batches_trained]
        return min(later) if self._enabled and later else None

    def check(self, batches_trained: int) -> None:
        """Start or stop timing if this batch is the first or the last to time."""
        is_inside = self._begin <= batches_trained and (self._end is None or batches_trained < self._end)
        if self._on != (self._enabled and is_inside):
            self._on = not self._on
            (self._profiler.on if self._on else self._profiler.off)()
            self._clock()

    def timed(self, stage: str, function: F) -> F:
        """Return the function, timed if timing is on."""
        if not self._on:
            return function
        seconds = self._seconds.setdefault(stage, [])

        def run(*args: Any, **kwargs: Any) -> Any:
            began = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(self._now() - began)

        return run  # type: ignore[return-value]  # called as the function is

    def take(self) -> Mapping[str, float]:
        """Return the mean milliseconds of each stage since the last call."""
        means = {f"{stage}_ms": 1e3 * sum(s) / len(s) for stage, s in self._seconds.items() if s}
        for stage, seconds in self._seconds.items():
            self._per_stage[stage] += sum(seconds)
            seconds.clear()
        return means

    def summary(self) -> list[str]:
        """Return lines with the share of each stage in the measured time, and advice; none if timing was never on."""
        self.take()
        self._clock()
        if not self._total:
            return []
        parts = {STAGES[stage]: seconds for stage, seconds in self._per_stage.items() if seconds}
        parts["the rest"] = max(self._total - sum(parts.values()), 0.0)
        shares = ", ".join(f"{name} {seconds / self._total:.0%}" for name, seconds in parts.items())
        return [f"{self._total:.1f} s went into: {shares}.", *self._advice()]

    def _advice(self) -> list[str]:
        data, training = self._per_stage["data_fetch"], self._per_stage["train_batch"]
        share = data / (data + training) if data else 0.0
        if share < MAX_DATA_SHARE:
            return []
        return [
            f"Training waits for data {share:.0%} of its time: give the training DataLoader more num_workers "
            "(persistent_workers=True keeps them), or make its data set faster."
        ]

    def _clock(self) -> None:
        """Add the time since the last call to the total, if timing was on."""
        now = time.perf_counter()
        self._total += now - self._since if self._since else 0.0
        self._since = now if self._on else 0.0

    def __enter__(self) -> Timings:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            self._profiler.off()

    def _now(self) -> float:
        if self._synchronizes:
            torch.cuda.synchronize()
        return time.perf_counter()


def _check_batch(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"configure_profiler({name}={value!r}): pass a batch index, an int >= 0.")
