"""Test a program before a long run: train one batch of one trial, in a temporary home folder."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from determined import _home, errors, storage
from determined._home import Home
from determined.experiment import _code
from determined.experiment._create import check
from determined.experiment._download import open_checkpoint
from determined.experiment._source import source_checkpoint
from determined.experiment.config import ExperimentConfig, from_map
from determined.experiment.executors import EndReason, InlineExecutor, RunExit, RunSpec, this_machine
from determined.experiment.executors._environment import base_environment, command_of, run_environment
from determined.experiment.executors._hook import run_hook
from determined.experiment.runner import OpenTrial, RunSpecs, runner_environment
from determined.experiment.search import Began, Create, Search
from determined.tracking import (
    Changeset,
    ExperimentDescription,
    ExperimentStore,
    MetricReport,
    NewTrial,
    RunState,
    TrackingReader,
    TrialChange,
)

TEST_VARIABLE = "DET_TEST_MODE"
"""Environment variable: with "1", `Trainer.fit` trains and validates one batch, and saves."""
_SIGNAL_STATUS = 128
"""What shells add to the number of the signal that ended a program."""


@dataclasses.dataclass(frozen=True, slots=True)
class TestRun:
    """The result of a test."""

    hparams: Mapping[str, Any]
    exit: RunExit
    reports: list[MetricReport]
    checkpoints: int


def first_trial(config: ExperimentConfig, folder: str | os.PathLike[str]) -> Create:
    """Return the first trial that the search would create."""
    search = Search(config.searcher, config.hyperparameters, config.seed, folder)
    return next(made for made in search.handle(Began()) if isinstance(made, Create))


def run_test(
    config: ExperimentConfig,
    folder: str | os.PathLike[str],
    first: Create,
    includes: Iterable[str | os.PathLike[str]] = (),
    at: Home | None = None,
) -> TestRun:
    """Train one batch of a trial, and leave nothing behind.

    A class trains in this process, a script in a process of its own; both on one slot, whatever the config says.
    """
    home, machine = at or _home.home(), this_machine()
    tree = config.to_dict()
    tree["resources"]["slots_per_trial"] = 1
    check(from_map(tree), folder, home)
    source = source_checkpoint(config, home)
    with tempfile.TemporaryDirectory(prefix="det-test-") as temporary:
        test_home = Home(pathlib.Path(temporary))
        _code.take(folder, test_home.code(1), includes)
        if source is not None:
            with open_checkpoint(TrackingReader(home.database).checkpoint(source)) as saved:
                storage.FolderStore(test_home.checkpoints).adopt(saved)
        in_test_home = from_map({**tree, "checkpoint_storage": {}})
        trial = _record(in_test_home, test_home, first)
        trial.placement = machine.placement([next(iter(machine.numbers))])
        spec = RunSpecs(1, in_test_home, test_home, "cuda" if machine.gpus else "cpu", source).spec(trial)
        spec.environment[TEST_VARIABLE] = "1"
        exit = _run_class(spec) if spec.is_class else _run_script(spec, runner_environment(test_home))
        records = TrackingReader(test_home.database)
        return TestRun(first.hparams, exit, records.history(trial.id), len(records.checkpoints()))


def _record(config: ExperimentConfig, home: Home, first: Create) -> OpenTrial:
    """Put the trial on record as its runner would, and return it."""
    description = ExperimentDescription(name=config.name, config=config.to_dict())
    with ExperimentStore.create(home.database, description) as store:
        store.claim()
        entrypoint = config.entrypoint if isinstance(config.entrypoint, str) else " ".join(config.entrypoint or [])
        new = NewTrial(request_id=first.request_id, hparams=first.hparams, seed=first.seed, entrypoint=entrypoint)
        (id,) = store.commit(Changeset(new_trials=[new]))
        store.commit(Changeset(trial_changes=[TrialChange(trial_id=id, state=RunState.ACTIVE, run_id=1)]))
    return OpenTrial(id=id, request_id=first.request_id, hparams=first.hparams, seed=first.seed, run_id=1)


def _run_class(spec: RunSpec) -> RunExit:
    executor = InlineExecutor()
    executor.start(spec)
    (exit,) = executor.poll(0.0)
    return exit


def _run_script(spec: RunSpec, variables: Mapping[str, str]) -> RunExit:
    spec.folder.mkdir(parents=True)
    try:
        environment = run_hook(spec, run_environment(base_environment(variables), spec))
    except RuntimeError as error:
        return RunExit.of(spec, EndReason.FAILED, str(error))
    try:
        status = subprocess.run(command_of(spec), cwd=spec.code, env=environment, check=False).returncode
    except (OSError, ValueError) as error:
        raise errors.InvalidExperimentException(
            f"the entrypoint {spec.entrypoint!r} cannot be run: {error}; name a program that is there."
        ) from error
    if spec.files.invalid_hp.exists():
        return RunExit.of(spec, EndReason.INVALID_HP, spec.files.invalid_hp.read_text(encoding="utf-8"))
    if status == 0:
        return RunExit.of(spec, EndReason.COMPLETED, status=0)
    status = status if status > 0 else _SIGNAL_STATUS - status
    return RunExit.of(spec, EndReason.FAILED, f"the script ended with status {status}", status=status)
