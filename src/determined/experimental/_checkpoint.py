"""Checkpoints in the client."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from determined import errors, experiment
from determined._home import Home
from determined._secrets import mask_variables
from determined.experimental import _metrics
from determined.experimental._states import CheckpointState
from determined.tracking import Catalog, CheckpointRecord, TrackingReader

if TYPE_CHECKING:
    from determined.pytorch import PyTorchTrial


class DownloadMode(enum.Enum):
    """How to download a checkpoint from a cluster; here the files are on this machine, and all modes do the same."""

    AUTO = "auto"
    DIRECT = "direct"
    MASTER = "master"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTrainingMetadata:
    """The origin of a checkpoint; `validation_metrics` are those at its step, under "avgMetrics", if it has any."""

    experiment_id: int
    trial_id: int
    experiment_config: Mapping[str, Any]
    hparams: Mapping[str, Any]
    validation_metrics: Mapping[str, Any]


class Checkpoint:
    """The saved state of a trial. A snapshot of the database; `reload` updates it."""

    def __init__(self, record: CheckpointRecord, home: Home) -> None:
        self._record = record
        self._home = home

    @property
    def uuid(self) -> str:
        """Its id."""
        return self._record.uuid

    @property
    def experiment_id(self) -> int:
        """The id of its experiment."""
        return self._record.experiment_id

    @property
    def trial_id(self) -> int:
        """The id of its trial."""
        return self._record.trial_id

    @property
    def steps_completed(self) -> int:
        """The number of batches after which it was saved."""
        return self._record.steps_completed

    @property
    def state(self) -> CheckpointState:
        """Whether its files exist."""
        return CheckpointState[self._record.state.name]

    @property
    def metadata(self) -> dict[str, Any]:
        """Its metadata. A copy: change it with `add_metadata` and `remove_metadata`."""
        return dict(self._record.metadata)

    @property
    def resources(self) -> dict[str, int]:
        """Its files, with the size of each in bytes."""
        return dict(self._record.resources)

    @property
    def report_time(self) -> datetime.datetime:
        """When it was saved, in UTC."""
        return _metrics.utc_time(self._record.time)

    @property
    def path(self) -> pathlib.Path:
        """The folder of its files, for reading; `download` makes a copy. `StorageException` if it is at a URL."""
        if "://" in self._record.path:
            raise errors.StorageException(
                f"checkpoint {self.uuid} is at {self._record.path}, not in a folder; call download() to get one."
            )
        return pathlib.Path(self._record.path)

    @property
    def training(self) -> CheckpointTrainingMetadata:
        """Its origin: experiment, trial, config, hyperparameters, validation metrics."""
        records = TrackingReader(self._home.database)
        validations = [one.metrics for one in self.get_metrics("validation")]
        return CheckpointTrainingMetadata(
            experiment_id=self.experiment_id,
            trial_id=self.trial_id,
            experiment_config=mask_variables(records.experiment(self.experiment_id).config or {}),
            hparams=records.trial(self.trial_id).hparams,
            validation_metrics={"avgMetrics": dict(validations[-1])} if validations else {},
        )

    def get_metrics(self, group: str | None = None) -> list[_metrics.TrialMetrics]:
        """Return the metrics of its trial at its step, of one group ("training", "validation", ...) or of all."""
        reports = TrackingReader(self._home.database).metrics(self.trial_id, group)
        own = [report for report in reports if report.steps_completed == self.steps_completed]
        return _metrics.of_reports(self.trial_id, own)

    def download(self, path: str | os.PathLike[str] | None = None, mode: DownloadMode | str = DownloadMode.AUTO) -> str:
        """Copy its files into a new or empty folder, by default `checkpoints/<uuid>`, and return the folder.

        The copy is verified. A folder that already contains the files is left unchanged. All modes do the same.
        """
        DownloadMode(mode)  # or ValueError
        return str(experiment.control.download_checkpoint(self._record, path or pathlib.Path("checkpoints", self.uuid)))

    def load(self, **arguments: Any) -> PyTorchTrial:
        """Return the trial that it was saved from, with its weights. Arguments are those of `load_from_path`."""
        with experiment.open_checkpoint(self._record) as saved:
            return self.load_from_path(saved.folder, **arguments)

    @staticmethod
    def load_from_path(path: str | os.PathLike[str], **arguments: Any) -> PyTorchTrial:
        """Return the trial in the folder of a checkpoint, as `pytorch.load_trial_from_checkpoint_path` does."""
        from determined.pytorch import load_trial_from_checkpoint_path

        return load_trial_from_checkpoint_path(os.fspath(path), **arguments)

    def add_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add metadata in the database, replacing values with the same names; its files do not change."""
        self._change({**self.reload()._record.metadata, **metadata})

    def remove_metadata(self, keys: Iterable[str]) -> None:
        """Remove metadata from the database; its files do not change."""
        to_remove, kept = [keys] if isinstance(keys, str) else list(keys), self.reload().metadata
        if missing := [key for key in to_remove if key not in kept]:
            raise errors.InvalidRequestException(
                f"checkpoint {self.uuid} has no metadata {missing}; it has {sorted(kept)}."
            )
        self._change({key: value for key, value in kept.items() if key not in to_remove})

    def delete(self) -> None:
        """Delete it and its files permanently; refused if it is a version of a model or the source of an experiment."""
        experiment.control.delete_checkpoint(self.uuid, self._home)
        self.reload()

    def reload(self) -> Checkpoint:
        """Read it from the database again, and return it."""
        self._record = TrackingReader(self._home.database).checkpoint(self.uuid)
        return self

    def _change(self, metadata: Mapping[str, Any]) -> None:
        Catalog(self._home.database).change_checkpoint(self.uuid, metadata)
        self.reload()

    def __repr__(self) -> str:
        return f"Checkpoint(uuid={self.uuid!r}, trial_id={self.trial_id}, steps_completed={self.steps_completed})"
