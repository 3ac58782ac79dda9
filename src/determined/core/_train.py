"""Report what training does: metrics, progress, state; to the record and to TensorBoard."""

from __future__ import annotations

import enum
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from determined import tracking
from determined.core._recording import Recording, now
from determined.core._scalars import ScalarLog


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
        self.report_metrics("training", steps_completed, metrics)
        self._scalars.training(steps_completed, metrics, batch_metrics or [])

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a validation."""
        self.report_metrics("validation", steps_completed, metrics)
        self._scalars.validation(steps_completed, metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Record metrics under a group name of your own."""
        _check_steps("report_metrics", steps_completed)
        _check_metrics(group, metrics)
        self._recording.put(
            tracking.MetricReport(group=group, steps_completed=steps_completed, metrics=dict(metrics), time=now())
        )

    def report_progress(self, progress: float) -> None:
        """Record how much of the training is done, from 0 to 1."""
        if not 0 <= progress <= 1:
            raise ValueError(f"report_progress({progress!r}): progress goes from 0 to 1.")
        self._recording.put(tracking.ProgressChanged(progress=float(progress)))

    def report_early_exit(self, reason: EarlyExitReason) -> None:
        """Record that the trial ends before its length, and why."""
        if not isinstance(reason, EarlyExitReason):
            raise TypeError(f"report_early_exit({reason!r}): pass a member of core.EarlyExitReason.")
        self._recording.put(tracking.StatusChanged(status=reason.value))

    def set_status(self, status: str) -> None:
        """Record in a few words what the trial is doing."""
        self._recording.put(tracking.StatusChanged(status=str(status)))

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the free metadata of this trial."""
        self._metadata = dict(metadata)
        self._recording.put(tracking.MetadataChanged(metadata=self._metadata))

    def get_metadata(self) -> dict[str, Any]:
        """Return the free metadata of this trial."""
        return dict(self._metadata)

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the folder of this trial's TensorBoard files; it exists."""
        folder = self._recording.tensorboard_path
        folder.mkdir(parents=True, exist_ok=True)
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


def _check_steps(call: str, steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"{call}(steps_completed={steps!r}): pass the number of batches trained, an int >= 0.")


def _check_metrics(group: str, metrics: Mapping[str, Any]) -> None:
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"The {group} metrics {metrics!r} must be a dict with metric names (str) as keys.")
