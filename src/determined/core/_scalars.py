"""Metrics as TensorBoard scalars, a window at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from determined import tensorboard
from determined.core._outbox import Outbox
from determined.core._recorder import Recording, now
from determined.core.metrics import BatchColumns, are_floats, as_number

logger = logging.getLogger("determined.core")

POSITIONS = ("batches", "epochs")
"""Metrics that say how far training has come: what other curves are drawn over, and none themselves."""


class _Window(NamedTuple):
    """The metrics of neighbouring batches, the last of which is batch `last_step`."""

    last_step: int
    batches: BatchColumns
    began: float
    ended: float


class ScalarLog:
    """Writes `Determined/<name>` curves on the outbox's thread; can be switched off."""

    def __init__(self, outbox: Outbox, recording: Recording, enabled: bool) -> None:
        self._outbox = outbox
        self._recording = recording
        self._file: tensorboard.EventFile | None = None
        self._making_file = threading.Lock()
        self._last_time = now()
        self._has_complained = False
        self.enabled = enabled

    @property
    def file(self) -> tensorboard.EventFile:
        """The event file of this process; it comes into being with the first write."""
        if self._file is None:
            folder = self._recording.tensorboard_path
            # The outbox's thread and the training thread may both be the first to ask.
            with self._making_file:
                self._file = self._file or tensorboard.EventFile(folder)
        return self._file

    def training(self, steps_completed: int, metrics: Mapping[str, Any], batches: BatchColumns) -> None:
        """Write the metrics of the batches that end with number `steps_completed`, and those of the whole window."""
        began, self._last_time = self._last_time, now()
        if self.enabled:
            self._outbox.put(self._write, _Window(steps_completed, batches, began, self._last_time))
            whole = {n: [v] for n, v in _numbers(metrics).items() if n not in batches.columns}
            if whole:
                self._outbox.put(self._write, _Window(steps_completed, BatchColumns(whole, 1), began, self._last_time))

    def validation(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a validation; names get the prefix `val_` unless they start with `val`."""
        if self.enabled:
            named = {_validation_name(n): [v] for n, v in _numbers(metrics).items()}
            self._outbox.put(self._write, _Window(steps_completed, BatchColumns(named, 1), now(), now()))

    def flush(self) -> None:
        """Write out what is buffered."""
        self._outbox.flush()
        if self._file is not None:
            with self._complaining():
                self._file.flush()

    def close(self) -> None:
        """Close the event file. The outbox must have been closed before."""
        if self._file is not None:
            with self._complaining():
                self._file.close()

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        """Say once that curves cannot be written; training need not end for them."""
        try:
            yield
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                logger.warning(
                    "TensorBoard curves cannot be written to %s (%s) and may be incomplete; training goes on. Make "
                    "room or permission there, or set DET_HOME to another folder.",
                    self._recording.tensorboard_path,
                    error.strerror or error,
                )

    def _write(self, windows: Sequence[_Window]) -> None:
        with self._complaining():
            self._write_windows(windows)

    def _write_windows(self, windows: Sequence[_Window]) -> None:
        for window in windows:
            count = len(window.batches)
            if count:
                # Programs that count in other units than batches may have more batches than steps.
                steps = np.maximum(np.arange(window.last_step - count + 1, window.last_step + 1), 0)
                # Spread evenly: asking for the time of each batch would cost more than it tells.
                times = np.linspace(window.began, window.ended, count + 1)[1:]
                for name, values in window.batches.columns.items():
                    self._write_curve(f"Determined/{name}", values, steps, times)
        self.file.flush()

    def _write_curve(self, name: str, values: Sequence[Any], steps: Any, times: Any) -> None:
        """Write the numbers of a column, and the means of its lists and arrays; what is no number has no curve."""
        if not are_floats(values):
            numbers = [(i, number) for i, value in enumerate(values) if (number := as_number(value)) is not None]
            chosen, values = [i for i, _ in numbers], [number for _, number in numbers]
            steps, times = steps[chosen], times[chosen]
        self.file.add_scalars(name, steps, np.array(values, np.float64), times)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that make a curve."""
    return {name: value for name, value in metrics.items() if isinstance(value, Real) and name not in POSITIONS}


def _validation_name(name: str) -> str:
    return name if name.startswith("val") else f"val_{name}"
