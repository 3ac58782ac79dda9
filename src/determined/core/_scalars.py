"""Metrics as TensorBoard scalars, a window at a time."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from determined import tensorboard
from determined.core._outbox import Outbox
from determined.core._recording import Recording, now


class _Window(NamedTuple):
    """The metrics of neighbouring batches, the last of which is batch `last_step`."""

    last_step: int
    batches: Sequence[Mapping[str, Any]]
    began: float
    ended: float


class ScalarLog:
    """Writes `Determined/<name>` curves on the outbox's thread; can be switched off."""

    def __init__(self, outbox: Outbox, recording: Recording, enabled: bool) -> None:
        self._outbox = outbox
        self._recording = recording
        self._file: tensorboard.EventFile | None = None
        self._last_time = now()
        self.enabled = enabled

    @property
    def file(self) -> tensorboard.EventFile:
        """The event file of this process; it comes into being with the first write."""
        if self._file is None:
            self._file = tensorboard.EventFile(pathlib.Path(self._recording.tensorboard_path))
        return self._file

    def training(self, steps_completed: int, metrics: Mapping[str, Any], batches: Sequence[Mapping[str, Any]]) -> None:
        """Write the metrics of the batches that end with number `steps_completed`, and those of the whole window."""
        began, self._last_time = self._last_time, now()
        if self.enabled:
            if batches:
                self._outbox.put(self._write, _Window(steps_completed, batches, began, self._last_time))
            known = batches[-1].keys() if batches else ()
            if whole := {name: value for name, value in metrics.items() if name not in known}:
                self._outbox.put(self._write, _Window(steps_completed, [whole], began, self._last_time))

    def validation(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a validation; names get the prefix `val_` unless they start with `val`."""
        if self.enabled:
            named = {n if n.startswith("val") else f"val_{n}": v for n, v in metrics.items()}
            self._outbox.put(self._write, _Window(steps_completed, [named], now(), now()))

    def flush(self) -> None:
        """Write out what is buffered."""
        self._outbox.flush()
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the event file. The outbox must have been closed before."""
        if self._file is not None:
            self._file.close()

    def _write(self, windows: Sequence[_Window]) -> None:
        for window in windows:
            for name, points in _curves(window).items():
                steps, values, times = zip(*points, strict=True)
                self.file.add_scalars(f"Determined/{name}", steps, values, times)
        self.file.flush()


def _curves(window: _Window) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, value, time) of each scalar metric; the times are spread evenly over the window."""
    curves: dict[str, list[tuple[int, float, float]]] = {}
    count = len(window.batches)
    pace = (window.ended - window.began) / count
    for i, metrics in enumerate(window.batches, start=1):
        step, time = window.last_step - count + i, window.began + pace * i
        for name, value in metrics.items():
            if isinstance(value, Real):
                curves.setdefault(name, []).append((step, float(value), time))
    return curves
