"""Report what training does: metrics, progress and status, to the record and to TensorBoard."""

from __future__ import annotations

import contextlib
import copy
import enum
import logging
import math
import operator
import pathlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from determined import tensorboard, tracking
from determined._home import make_private, note_invalid_hp
from determined.core._outbox import Outbox
from determined.core._recorder import RunRecorder, checked_metadata
from determined.core.metrics import POSITION_METRICS, BatchColumns, are_floats, as_number

logger = logging.getLogger("determined.core")


class EarlyExitReason(enum.Enum):
    """Why a trial ended before its length."""

    INVALID_HP = "EXITED_REASON_INVALID_HP"
    USER_REQUESTED_STOP = "EXITED_REASON_USER_REQUESTED_STOP"


class TrainContext:
    """Reports what one trial does. Every call returns at once; a background thread writes."""

    def __init__(self, recorder: RunRecorder, scalars: ScalarLog, searcher_metric: tuple[str, bool] | None) -> None:
        self._recorder = recorder
        self._scalars = scalars
        self._searcher_metric = searcher_metric
        self._metadata: dict[str, Any] = {}

    def report_training_metrics(
        self,
        steps_completed: int,
        metrics: Mapping[str, Any],
        batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Record averages over the batches since the last report, and the batches' own metrics if given."""
        if not isinstance(batch_metrics, BatchColumns):
            batch_metrics = BatchColumns.of_rows([_plain("batch", batch) for batch in batch_metrics or []])
        report = self._report("training", steps_completed, metrics)
        self._scalars.training(report.steps_completed, report.metrics, batch_metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a validation."""
        report = self._report("validation", steps_completed, metrics)
        self._scalars.validation(report.steps_completed, report.metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Record metrics under a group name of your own."""
        if not isinstance(group, str) or not group:
            raise TypeError(f"report_metrics(group={group!r}): pass the name of a metric group, such as 'inference'.")
        self._report(group, steps_completed, metrics)

    def report_progress(self, progress: float) -> None:
        """Record how much of the training is done, from 0 to 1."""
        self._recorder.put(tracking.ProgressChanged(progress=_checked_progress(progress)))

    def report_early_exit(self, reason: EarlyExitReason) -> None:
        """Record that the trial ends before its length, and why."""
        if not isinstance(reason, EarlyExitReason):
            raise TypeError(f"report_early_exit({reason!r}): pass a member of core.EarlyExitReason.")
        if reason is EarlyExitReason.INVALID_HP:
            note_invalid_hp("the trial reported invalid hyperparameters")
        self._recorder.put(tracking.StatusChanged(status=reason.value))

    def set_status(self, status: str) -> None:
        """Record what the trial is doing, in a few words."""
        self._recorder.put(tracking.StatusChanged(status=str(status)))

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the free metadata of this trial."""
        self._metadata = checked_metadata("trial", metadata)
        self._recorder.put(tracking.MetadataChanged(metadata=self._metadata))

    def get_metadata(self) -> dict[str, Any]:
        """Return the free metadata of this trial."""
        return copy.deepcopy(self._metadata)

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the folder of this trial's TensorBoard files; it exists."""
        folder = self._recorder.tensorboard_path
        make_private(folder)
        return folder

    def upload_tensorboard_files(
        self,
        selector: Callable[[pathlib.PurePath], bool] = lambda _: True,
        mangler: Callable[[pathlib.PurePath, int], pathlib.PurePath] = lambda path, __: path,
    ) -> None:
        """Write out what is buffered. Files are uploaded by themselves; `selector` and `mangler` have no effect."""
        self._scalars.flush()

    def get_experiment_best_validation(self) -> float | None:
        """Return the best recorded value of the searcher's metric, or None if there is none."""
        return self._recorder.best_validation(*self._searcher_metric) if self._searcher_metric else None

    def _report(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> tracking.MetricReport:
        steps, values = _checked_steps(steps_completed), _plain(group, metrics)
        report = tracking.MetricReport(group=group, steps_completed=steps, metrics=values, time=time.time())
        self._recorder.put(report)
        return report


class _Window(NamedTuple):
    """The metrics of neighbouring batches, the last of which is batch `last_step`."""

    last_step: int
    batches: BatchColumns
    began: float
    ended: float


class ScalarLog:
    """Writes `Determined/<name>` curves for TensorBoard on the outbox's thread, while `enabled`."""

    def __init__(self, outbox: Outbox, recorder: RunRecorder, enabled: bool) -> None:
        self._outbox = outbox
        self._recorder = recorder
        self._file: tensorboard.EventFile | None = None
        self._file_lock = threading.Lock()
        self._last_time = time.time()
        self._has_warned = False
        self.enabled = enabled

    @property
    def file(self) -> tensorboard.EventFile:
        """The event file of this process; created when first used."""
        if self._file is None:
            folder = self._recorder.tensorboard_path
            # The outbox's thread and the training thread may both be the first to ask.
            with self._file_lock:
                self._file = self._file or tensorboard.EventFile(folder)
        return self._file

    def training(self, steps_completed: int, metrics: Mapping[str, Any], batches: BatchColumns) -> None:
        """Write the metrics of the batches that end with number `steps_completed`, and those of the whole window."""
        began, self._last_time = self._last_time, time.time()
        of_window = {name: value for name, value in _numbers(metrics).items() if name not in batches.columns}
        self._put(_Window(steps_completed, batches, began, self._last_time))
        self._put(_Window(steps_completed, BatchColumns.of_rows([of_window]), began, self._last_time))

    def validation(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a validation; names get the prefix `val_` unless they start with `val`."""
        named = {n if n.startswith("val") else f"val_{n}": value for n, value in _numbers(metrics).items()}
        self._put(_Window(steps_completed, BatchColumns.of_rows([named]), time.time(), time.time()))

    def flush(self) -> None:
        """Write out what is buffered."""
        self._outbox.flush()
        if self._file is not None:
            with self._warning():
                self._file.flush()

    def close(self) -> None:
        """Close the event file. Close the outbox first."""
        if self._file is not None:
            with self._warning():
                self._file.close()

    def _put(self, window: _Window) -> None:
        if self.enabled and window.batches:
            self._outbox.put(self._write, window)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Warn once if curves cannot be written; training continues without them."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "TensorBoard curves cannot be written to %s (%s) and may be incomplete; training continues. Make "
                    "room or permission there, or set DET_HOME to another folder.",
                    self._recorder.tensorboard_path,
                    error.strerror or error,
                )

    def _write(self, windows: Sequence[_Window]) -> None:
        with self._warning():
            for last_step, batches, began, ended in windows:
                # Programs that count in other units than batches may have more batches than steps.
                steps = np.maximum(np.arange(last_step - len(batches) + 1, last_step + 1), 0)
                # Spread evenly: reading the clock for each batch would cost more than it is worth.
                times = np.linspace(began, ended, len(batches) + 1)[1:]
                for name, values in batches.columns.items():
                    self._write_curve(f"Determined/{name}", values, steps, times)
            self.file.flush()

    def _write_curve(self, name: str, values: Sequence[Any], steps: Any, times: Any) -> None:
        """Write the numbers of a column, and the means of its lists and arrays; other values have no curve."""
        if not are_floats(values):
            numbers = [(i, number) for i, value in enumerate(values) if (number := as_number(value)) is not None]
            chosen, values = [i for i, _ in numbers], [number for _, number in numbers]
            steps, times = steps[chosen], times[chosen]
        self.file.add_scalars(name, steps, np.array(values, np.float64), times)


def _checked_steps(steps: Any) -> int:
    try:
        count = None if isinstance(steps, bool) else operator.index(steps)
    except TypeError:
        count = None
    if count is None:
        raise ValueError(f"steps_completed={steps!r}: pass the number of batches trained, an int >= 0.")
    if count < 0:
        warnings.warn(f"steps_completed={count} is recorded as 0: the batches trained cannot be less.", stacklevel=4)
    return max(count, 0)


def _checked_progress(progress: Any) -> float:
    if not isinstance(progress, Real) or math.isnan(progress):
        raise ValueError(f"report_progress({progress!r}): progress is a number from 0 to 1.")
    inside = min(max(float(progress), 0.0), 1.0)
    if inside != progress:
        warnings.warn(f"report_progress({progress!r}) is recorded as {inside:g}: progress is 0 to 1.", stacklevel=3)
    return inside


def _plain(group: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the metrics: what the program does to its tensors and lists later has no effect."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"The {group} metrics {metrics!r} must be a dict with metric names (str) as keys.")
    return {name: value if type(value) is float else _plain_value(value) for name, value in metrics.items()}


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(tolist := getattr(value, "tolist", None)) and getattr(value, "ndim", None) == 0:
        return tolist()
    return tracking.as_stored(value)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that have a curve."""
    return {n: value for n, value in metrics.items() if isinstance(value, Real) and n not in POSITION_METRICS}
