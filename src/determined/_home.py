"""The home folder: the one owner of every folder and file name under it."""

from __future__ import annotations

import dataclasses
import os
import pathlib

HOME_VARIABLE = "DET_HOME"


@dataclasses.dataclass(frozen=True, slots=True)
class Home:
    """Where Resolute keeps what outlives a process: records, checkpoints, TensorBoard files."""

    path: pathlib.Path

    @property
    def database(self) -> pathlib.Path:
        """The tracking database (SQLite)."""
        return self.path / "tracking.db"

    @property
    def checkpoints(self) -> pathlib.Path:
        """One folder a checkpoint id."""
        return self.path / "checkpoints"

    def tensorboard(self, experiment_id: int, trial_id: int) -> pathlib.Path:
        """TensorBoard files of one trial."""
        return self.path / "tensorboard" / f"experiment-{experiment_id}" / f"trial-{trial_id}"

    @property
    def unattached_tensorboard(self) -> pathlib.Path:
        """TensorBoard files of writers that belong to no trial."""
        return self.path / "tensorboard" / "unattached"


def home() -> Home:
    """Return the home folder: `DET_HOME` if set, else the user's data folder of this platform."""
    chosen = os.environ.get(HOME_VARIABLE)
    return Home(pathlib.Path(chosen).expanduser().absolute() if chosen else _user_data_folder())


def _user_data_folder() -> pathlib.Path:
    try:
        import platformdirs
    except ImportError:  # a bare machine with nothing but torch: what platformdirs says for Linux
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return pathlib.Path(base).expanduser() / "resolute"
    return platformdirs.user_data_path("resolute", appauthor=False)
