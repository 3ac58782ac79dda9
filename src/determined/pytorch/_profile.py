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
        self._on = False

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
        for seconds in self._seconds.values():
            seconds.clear()
        return means

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
