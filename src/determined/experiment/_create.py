"""Create an experiment: check what can be checked, copy its program, put it on record."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterable, Iterator

from determined import _home, errors, storage
from determined._home import Home, make_private
from determined._secrets import mask_storage
from determined.experiment import _code
from determined.experiment._source import pinned, source_checkpoint
from determined.experiment.config import ExperimentConfig
from determined.experiment.executors import Cluster, connect
from determined.experiment.search import Search
from determined.processes import missing_guarantees
from determined.tracking import Desired, ExperimentDescription, ExperimentStore

logger = logging.getLogger("determined.experiment")

_NEW = "new-"
"""The prefix of folders whose experiments are not on record yet."""


def create(
    config: ExperimentConfig,
    folder: str | os.PathLike[str],
    includes: Iterable[str | os.PathLike[str]] = (),
    *,
    paused: bool = False,
    at: Home | None = None,
    slots: int | None = None,
    on: str | None = None,
) -> int:
    """Copy the program in a folder, record an experiment, and return its id. Nothing runs yet.

    `includes` are files and folders to copy beside what is in the folder. `on` is the cluster to run on; None is this
    machine.
    """
    home = at or _home.home()
    check(config, folder, home, connect(on, slots))
    if (missing := missing_guarantees()) is not None:
        logger.warning(missing)
    config = pinned(config, home)
    with _staging(home) as staging:
        code = staging / "code"
        _code.take(pathlib.Path(folder), code, includes)
        put_in_place = functools.partial(_put_in_place, code, home)
        with ExperimentStore.create(home.database, _described(config, paused, on), put_in_place) as store:
            return store.experiment_id


def _put_in_place(code: pathlib.Path, home: Home, experiment_id: int) -> None:
    """Move the copy of a program into the folder of its experiment, whose id is new."""
    folder = home.experiment(experiment_id)
    with storage.errors_naming(folder):
        if folder.exists():
            _require_own_folders(home, folder)
            # Of an experiment of a database that is gone, or of a `create` that was killed at this point.
            aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
            folder.rename(aside)
            logger.warning("%s belongs to no experiment on record, and was renamed to %s.", folder, aside)
        make_private(folder)
        code.rename(home.code(experiment_id))


def _require_own_folders(home: Home, folder: pathlib.Path) -> None:
    """Refuse to move the folder of an experiment away that another database has on record."""
    usual = dataclasses.replace(home, chosen_database=None).database
    if home.database != usual and pathlib.Path(usual).exists():
        raise errors.StorageException(
            f"{folder} belongs to an experiment of {str(usual)!r}, not of the database that DET_DATABASE names; set "
            "DET_HOME to another folder: each database needs one of its own."
        )


@contextlib.contextmanager
def _staging(home: Home) -> Iterator[pathlib.Path]:
    """Provide a locked folder for what is not on record yet; it is removed after the block."""
    make_private(home.experiments)
    staging = home.experiments / f"{_NEW}{uuid.uuid4().hex}"
    with storage.locked(staging):
        staging.mkdir(mode=0o700)
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def remove_leftovers(home: Home) -> list[str]:
    """Remove the folders that a killed `create` has left in the home folder, and return their names."""
    return storage.remove_abandoned(home.experiments, f"{_NEW}*", f".{_NEW}*.partial")


def check(
    config: ExperimentConfig, folder: str | os.PathLike[str], at: Home | None = None, cluster: Cluster | None = None
) -> None:
    """Refuse an experiment that cannot run on a cluster, by default this machine."""
    home = at or _home.home()
    if config.entrypoint is None:
        raise errors.InvalidExperimentException(
            "The config has no entrypoint; write entrypoint: model_def:MyTrial for a class in model_def.py, or a "
            "command."
        )
    (cluster or connect()).check(config)
    storage.store_for(config.to_dict()["checkpoint_storage"], home.checkpoints).check()
    source_checkpoint(config, home)
    Search(config.searcher, config.hyperparameters, config.seed, folder)  # raises if its method cannot be made


def _described(config: ExperimentConfig, paused: bool, on: str | None) -> ExperimentDescription:
    return ExperimentDescription(
        name=config.name,
        config=mask_storage(config.to_dict()),
        description=config.description,
        labels=config.labels,
        project=config.project or None,
        workspace=config.workspace or None,
        priority=config.resources.priority,
        max_slots=config.resources.max_slots,
        desired=Desired.PAUSED if paused else Desired.ACTIVE,
        cluster=on,
    )
