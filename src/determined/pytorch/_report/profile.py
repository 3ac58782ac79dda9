"""Where the time goes: torch's profiler over the run, and timings of the loop's stages."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
"""What the loop does, by the names under which its times are recorded, and in a word."""

_MUCH_WAITING = 0.3


class TorchProfiler:
    """One `torch.profiler.profile` over the run, stepped by the loop after each batch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], folder: Callable[[], pathlib.Path]) -> None:
        self._args = args
        self._kwargs = kwargs
        self._folder = folder

    @contextmanager
    def running(self) -> Iterator[Callable[[], None]]:
        """Profile for as long as the block lasts; gives the function to call after each batch."""
        write = torch.profiler.tensorboard_trace_handler(str(self._folder()))
        with torch.profiler.profile(*self._args, **{"on_trace_ready": write, **self._kwargs}) as profiler:
            yield profiler.step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerSettings:
    """What `Trainer.configure_profiler` was told."""

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
    """System metrics and times of the loop's stages, between two batches of the run."""

    def __init__(self, settings: ProfilerSettings, profiler: core.ProfilerContext, device: torch.device) -> None:
        self._settings = settings
        self._profiler = profiler
        self._waits = settings.sync_timings and device.type == "cuda"
        self._seconds: dict[str, list[float]] = {}
        self._totals: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._on = False
        self._since = 0.0
        self._whole = 0.0

    def next_change(self, batches_trained: int) -> int | None:
        """Return the number of batches at which timing next begins or ends."""
        settings = self._settings
        end = None if settings.end_after_batch is None else settings.end_after_batch + 1
        changes = [b for b in (settings.begin_on_batch, end) if b is not None and b > batches_trained]
        return min(changes) if settings.enabled and changes else None

    def look(self, batches_trained: int) -> bool:
        """Begin or end if it is time to, and say whether timing is on."""
        settings = self._settings
        last = settings.end_after_batch
        wanted = (
            settings.enabled
            and settings.begin_on_batch <= batches_trained
            and (last is None or batches_trained <= last)
        )
        if wanted != self._on:
            (self._profiler.on if wanted else self._profiler.off)()
            self._on = wanted
            self._clock()
        return self._on

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
            self._totals[stage] += sum(seconds)
            seconds.clear()
        return means

    def summary(self) -> list[str]:
        """Return in words where the time went while timing was on, and what to change; nothing if it never was."""
        self.take()
        self._clock()
        if not self._whole:
            return []
        parts = {STAGES[stage]: seconds for stage, seconds in self._totals.items() if seconds}
        parts["the rest"] = max(self._whole - sum(parts.values()), 0.0)
        shares = ", ".join(f"{name} {seconds / self._whole:.0%}" for name, seconds in parts.items())
        return [f"{self._whole:.1f} s went into: {shares}.", *self._advice()]

    def _advice(self) -> list[str]:
        data, training = self._totals["data_fetch"], self._totals["train_batch"]
        share = data / (data + training) if data else 0.0
        if share < _MUCH_WAITING:
            return []
        return [
            f"Training waits for data {share:.0%} of its time: give the training DataLoader more num_workers "
            "(persistent_workers=True keeps them), or make its data set faster."
        ]

    def _clock(self) -> None:
        """Add the time since the last call, if timing was on, to the whole."""
        now = time.perf_counter()
        self._whole += now - self._since if self._since else 0.0
        self._since = now if self._on else 0.0

    def __enter__(self) -> Timings:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            self._profiler.off()

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize()
        return time.perf_counter()


def _check_batch(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"configure_profiler({name}={value!r}): pass a batch index, an int >= 0.")
