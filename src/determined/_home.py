"""The home folder: the one owner of every folder and file name under it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib

from determined import errors
from determined._database_location import DatabaseLocation, located, name_of

HOME_VARIABLE = "DET_HOME"
DATABASE_VARIABLE = "DET_DATABASE"
"""Names a tracking database that is not in the home folder: a path or a URL."""
RUN_FOLDER_VARIABLE = "DET_RUN_FOLDER"
"""Tells a trial process the folder of its run."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunFolder:
    """What is kept of one run of a trial: its output, and how it ended."""

    path: pathlib.Path

    def log(self, rank: int) -> pathlib.Path:
        """The output of one rank."""
        return self.path / f"rank-{rank}.log"

    def logs(self) -> dict[int, pathlib.Path]:
        """The output of all ranks that have any, by their number."""
        numbers = [path.stem.removeprefix("rank-") for path in self.path.glob("rank-*.log")]
        return {rank: self.log(rank) for rank in sorted(map(int, filter(str.isdecimal, numbers)))}

    @property
    def shim(self) -> pathlib.Path:
        """Which process supervises the run."""
        return self.path / "shim.json"

    @property
    def exit(self) -> pathlib.Path:
        """How the run ended; there once it has."""
        return self.path / "exit.json"

    @property
    def spec(self) -> pathlib.Path:
        """What to run, for the job of a cluster that runs it."""
        return self.path / "spec.json"

    @property
    def orders(self) -> pathlib.Path:
        """What its runner wants of a job: a word a line, the last one counts."""
        return self.path / "orders"

    @property
    def job(self) -> pathlib.Path:
        """Which job of a cluster runs it."""
        return self.path / "job.json"

    @property
    def job_files(self) -> pathlib.Path:
        """What a job of a cluster needs and writes itself."""
        return self.path / "job"

    @property
    def interrupted(self) -> pathlib.Path:
        """By what a cluster asked it to stop; there only if one did."""
        return self.path / "interrupted"

    @property
    def not_started(self) -> pathlib.Path:
        """Why the entrypoint cannot be run; there only if it cannot."""
        return self.path / "not_started"

    @property
    def invalid_hp(self) -> pathlib.Path:
        """Why the trial gave up on its hyperparameters; there only if it did."""
        return self.path / "invalid_hp"


@dataclasses.dataclass(frozen=True, slots=True)
class Home:
    """Where Resolute keeps what outlives a process: records, checkpoints, TensorBoard files."""

    path: pathlib.Path
    chosen_database: DatabaseLocation | None = dataclasses.field(default=None, repr=False)
    """A database elsewhere; None for the one in this folder."""

    @property
    def database(self) -> DatabaseLocation:
        """The tracking database: the path of an SQLite file, or the URL of a server, which may hold a password."""
        return self.path / "tracking.db" if self.chosen_database is None else self.chosen_database

    @property
    def database_name(self) -> str:
        """What names the database in files, without user and password."""
        return name_of(self.database)

    @property
    def may_have_database(self) -> bool:
        """Whether there is a database; True for one on a server, which has to be asked."""
        return not isinstance(self.database, pathlib.Path) or self.database.exists()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which another process finds this home folder and its database."""
        return {HOME_VARIABLE: str(self.path), DATABASE_VARIABLE: str(self.database)}

    @property
    def checkpoints(self) -> pathlib.Path:
        """One folder a checkpoint id."""
        return self.path / "checkpoints"

    @property
    def stores(self) -> pathlib.Path:
        """One folder for each checkpoint store at a URL: what is to be uploaded, and copies of what was read."""
        return self.path / "stores"

    @property
    def storage_credentials(self) -> pathlib.Path:
        """The keys that configs name for checkpoint stores, by location."""
        return self.path / "storage-credentials.json"

    @property
    def distributed_key(self) -> pathlib.Path:
        """The key by which ranks of this user on one machine sign what they exchange."""
        return self.path / "distributed.key"

    def tensorboards(self, experiment_id: int) -> pathlib.Path:
        """TensorBoard files of all trials of an experiment."""
        return self.path / "tensorboard" / f"experiment-{experiment_id}"

    def tensorboard(self, experiment_id: int, trial_id: int) -> pathlib.Path:
        """TensorBoard files of one trial."""
        return self.tensorboards(experiment_id) / f"trial-{trial_id}"

    def tensorboard_prefix(self, experiment_id: int, trial_id: int | None = None) -> str:
        """Where a checkpoint store has the TensorBoard files of an experiment, or of one of its trials.

        Databases that share a store have folders of their own.
        """
        key = hashlib.sha256(self.database_name.encode()).hexdigest()[:12]
        of_experiment = f"tensorboard/{key}/experiment-{experiment_id}"
        return of_experiment if trial_id is None else f"{of_experiment}/trial-{trial_id}"

    @property
    def experiments(self) -> pathlib.Path:
        """One folder an experiment id."""
        return self.path / "experiments"

    def experiment(self, experiment_id: int) -> pathlib.Path:
        """What a runner keeps of one experiment."""
        return self.experiments / str(experiment_id)

    def code(self, experiment_id: int) -> pathlib.Path:
        """The snapshot of the program that an experiment's trials run."""
        return self.experiment(experiment_id) / "code"

    def runner_log(self, experiment_id: int) -> pathlib.Path:
        """What the runner of an experiment has to say."""
        return self.experiment(experiment_id) / "runner.log"

    def trial(self, experiment_id: int, trial_id: int) -> pathlib.Path:
        """The folders of a trial's runs."""
        return self.experiment(experiment_id) / f"trial-{trial_id}"

    def logs(self, experiment_id: int) -> list[pathlib.Path]:
        """All output that is kept of an experiment: its runner's, and that of its trials' runs."""
        trials = sorted(self.experiment(experiment_id).glob("trial-*"))
        of_runs = [log for trial in trials for run in runs_of(trial).values() for log in run.logs().values()]
        return [log for log in (self.runner_log(experiment_id), *of_runs) if log.exists()]

    def run(self, experiment_id: int, trial_id: int, run_id: int) -> RunFolder:
        """The folder of one run of a trial."""
        return RunFolder(self.trial(experiment_id, trial_id) / f"run-{run_id}")

    @property
    def unattached_tensorboard(self) -> pathlib.Path:
        """TensorBoard files of writers that belong to no trial."""
        return self.path / "tensorboard" / "unattached"


def home() -> Home:
    """Return the home folder: `DET_HOME` if set, else the user's data folder of this platform.

    Its tracking database is what `DET_DATABASE` names, if that is set.
    """
    chosen = os.environ.get(HOME_VARIABLE)
    path = pathlib.Path(chosen).expanduser().absolute() if chosen else _user_data_folder()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise errors.StorageException(
            f"The home folder {os.fsencode(path)!r} has a name that is not UTF-8, which the record cannot hold; set "
            f"{HOME_VARIABLE} to another folder."
        ) from None
    database = os.environ.get(DATABASE_VARIABLE)
    return Home(path, located(database) if database else None)


def make_private(folder: pathlib.Path) -> None:
    """Make a folder and those above it that are missing, for their owner alone, whatever the umask says.

    Folders below the home folder that exist already are closed to others too. So is the default home folder, but not
    one that `DET_HOME` names, which may have other uses.
    """
    above = [folder, *folder.parents]
    for missing in reversed([one for one in above if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # which fails where there is a file
    top = home().path
    private = [one for one in above if one.is_relative_to(top) and (one != top or not os.environ.get(HOME_VARIABLE))]
    for one in private:
        with contextlib.suppress(OSError):  # as where the file system has no modes
            found = one.stat()
            if found.st_mode & 0o077 and found.st_uid == os.geteuid():
                one.chmod(0o700)


def private_opener(path: str, flags: int) -> int:
    """Open a file, for `open(opener=...)`; a new one is for its owner alone."""
    return os.open(path, flags, 0o600)


def trials_of(experiment: pathlib.Path) -> dict[int, pathlib.Path]:
    """Return the folders of an experiment's trials that have any, by their id, in order."""
    return {number: experiment / f"trial-{number}" for number in _numbered(experiment, "trial-")}


def runs_of(trial: pathlib.Path) -> dict[int, RunFolder]:
    """Return the folders of a trial's runs by their number, in order."""
    return {number: RunFolder(trial / f"run-{number}") for number in _numbered(trial, "run-")}


def _numbered(folder: pathlib.Path, prefix: str) -> list[int]:
    numbers = [path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*")]
    return sorted(map(int, filter(str.isdecimal, numbers)))


def note_invalid_hp(reason: str) -> None:
    """Let whoever supervises this run know that its hyperparameters make no sense; the first reason stays."""
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if not folder:
        return
    note = RunFolder(pathlib.Path(folder)).invalid_hp
    with (
        contextlib.suppress(OSError),
        open(note, "x", encoding="utf-8", errors="replace", opener=private_opener) as file,
    ):
        file.write(reason)  # the file alone tells enough where the disk is full


def _user_data_folder() -> pathlib.Path:
    try:
        import platformdirs
    except ImportError:  # a bare machine with nothing but torch: what platformdirs says for Linux
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return pathlib.Path(base).expanduser() / "resolute"
    return platformdirs.user_data_path("resolute", appauthor=False)
