"""Report what training does: metrics, progress, state; to the record and to TensorBoard."""

from __future__ import annotations

import copy
import enum
import json
import math
import operator
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from determined import tracking
from determined._home import make_private, note_invalid_hp
from determined.core._metadata import checked_metadata
from determined.core._recorder import Recording, now
from determined.core._scalars import ScalarLog
from determined.core.metrics import BatchColumns


class EarlyExitReason(enum.Enum):
    """Why a trial ended before its length."""

    INVALID_HP = "EXITED_REASON_INVALID_HP"
    USER_REQUESTED_STOP = "EXITED_REASON_USER_REQUESTED_STOP"


class TrainContext:
    """Reports of one trial. Every call returns at once; a background thread writes."""

    def __init__(
        self,
        recording: Recording,
        scalars: ScalarLog,
        searcher: tuple[str, bool] | None,
        upload: Callable[[Callable[[pathlib.PurePath], bool]], None],
    ) -> None:
        self._recording = recording
        self._scalars = scalars
        self._searcher = searcher
        self._upload = upload
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
        self._recording.put(tracking.ProgressChanged(progress=_checked_progress(progress)))

    def report_early_exit(self, reason: EarlyExitReason) -> None:
        """Record that the trial ends before its length, and why."""
        if not isinstance(reason, EarlyExitReason):
            raise TypeError(f"report_early_exit({reason!r}): pass a member of core.EarlyExitReason.")
        if reason is EarlyExitReason.INVALID_HP:
            note_invalid_hp("the trial reported invalid hyperparameters")
        self._recording.put(tracking.StatusChanged(status=reason.value))

    def set_status(self, status: str) -> None:
        """Record in a few words what the trial is doing."""
        self._recording.put(tracking.StatusChanged(status=str(status)))

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the free metadata of this trial."""
        self._metadata = checked_metadata("trial", metadata)
        self._recording.put(tracking.MetadataChanged(metadata=self._metadata))

    def get_metadata(self) -> dict[str, Any]:
        """Return the free metadata of this trial."""
        return copy.deepcopy(self._metadata)

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the folder of this trial's TensorBoard files; it exists."""
        folder = self._recording.tensorboard_path
        make_private(folder)
        return folder

    def upload_tensorboard_files(
        self,
        selector: Callable[[pathlib.PurePath], bool] = lambda _: True,
        mangler: Callable[[pathlib.PurePath, int], pathlib.PurePath] = lambda path, __: path,
    ) -> None:
        """Write out what is buffered; the files are in their final place from the start."""
        self._upload(selector)

    def get_experiment_best_validation(self) -> float | None:
        """Return the best recorded value of the searcher's metric, or None if there is none."""
        if self._searcher is None:
            return None
        return self._recording.best_validation(*self._searcher)

    def _report(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> tracking.MetricReport:
        steps, values = _checked_steps(steps_completed), _plain(group, metrics)
        report = tracking.MetricReport(group=group, steps_completed=steps, metrics=values, time=now())
        self._recording.put(report)
        return report


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
    """Return the metrics as they are now: what the program does to its tensors and lists later stays out."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"The {group} metrics {metrics!r} must be a dict with metric names (str) as keys.")
    return {name: value if type(value) is float else _plain_value(value) for name, value in metrics.items()}


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(tolist := getattr(value, "tolist", None)) and getattr(value, "ndim", None) == 0:
        return tolist()
    return json.loads(tracking.encode_json(value))
