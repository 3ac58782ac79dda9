"""Try a program out before a long run: one batch of one trial, in a home folder that vanishes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from determined import errors, storage
from determined._home import Home, home
from determined.experiment import _code
from determined.experiment._create import check
from determined.experiment._download import open_checkpoint
from determined.experiment._results import source_checkpoint
from determined.experiment.config import ExperimentConfig, from_map
from determined.experiment.executors import EndReason, InlineExecutor, Machine, RunExit, RunSpec, this_machine
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
"""Environment variable: "1" lets `Trainer.fit` train and validate one batch, and save."""
_OF_SHELLS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class TestRun:
    """What came of it."""

    hparams: Mapping[str, Any]
    ended: RunExit
    reports: list[MetricReport]
    checkpoints: int


def first_trial(config: ExperimentConfig, folder: str | os.PathLike[str]) -> Create:
    """Return the first trial that the search would run."""
    search = Search(config.searcher, config.hyperparameters, config.seed, folder)
    return next(made for made in search.handle(Began()) if isinstance(made, Create))


def run_test(
    config: ExperimentConfig,
    folder: str | os.PathLike[str],
    first: Create,
    includes: Iterable[str | os.PathLike[str]] = (),
    at: Home | None = None,
) -> TestRun:
    """Train one batch of a trial; nothing of it stays.

    A class trains in this process, a script as a process of its own; both on one slot, whatever the config says.
    """
    place, machine = at or home(), this_machine()
    config = _on_one_slot(config)
    check(config, folder, place, machine)
    with _stage() as stage:
        _code.take(pathlib.Path(folder), stage.code(1), includes)
        source = _brought(source_checkpoint(config, place), place, stage)
        staged = _stored_at_home(config)
        with _recorded(staged, stage, first) as trial:
            spec = _spec(staged, stage, machine, trial, source)
            ended = _in_this_process(spec) if spec.is_class else _as_a_script(spec, runner_environment(stage))
        records = TrackingReader(stage.database)
        return TestRun(first.hparams, ended, records.history(trial.id), len(records.checkpoints()))


@contextlib.contextmanager
def _stage() -> Iterator[Home]:
    """Give a home folder that vanishes."""
    with tempfile.TemporaryDirectory(prefix="det-test-") as folder:
        yield Home(pathlib.Path(folder))


def _on_one_slot(config: ExperimentConfig) -> ExperimentConfig:
    tree = config.to_dict()
    tree["resources"]["slots_per_trial"] = 1
    return from_map(tree)


def _stored_at_home(config: ExperimentConfig) -> ExperimentConfig:
    """Return a config by which checkpoints go to the home folder, and vanish with it."""
    return from_map({**config.to_dict(), "checkpoint_storage": {}})


def _brought(uuid: str | None, place: Home, stage: Home) -> str | None:
    """Let the checkpoint of a warm start be found from the stage."""
    if uuid is not None:
        with open_checkpoint(TrackingReader(place.database).checkpoint(uuid)) as saved:
            storage.FolderStore(stage.checkpoints).adopt(saved)
    return uuid


@contextlib.contextmanager
def _recorded(config: ExperimentConfig, stage: Home, first: Create) -> Iterator[OpenTrial]:
    """Put the trial on record on the stage, as its runner."""
    described = ExperimentDescription(name=config.name, config=config.to_dict())
    with ExperimentStore.create(stage.database, described) as ledger:
        ledger.claim()
        entrypoint = config.entrypoint if isinstance(config.entrypoint, str) else " ".join(config.entrypoint or [])
        new = NewTrial(request_id=first.request_id, hparams=first.hparams, seed=first.seed, entrypoint=entrypoint)
        (id,) = ledger.commit(Changeset(new_trials=[new]))
        ledger.commit(Changeset(trial_changes=[TrialChange(trial_id=id, state=RunState.ACTIVE, run_id=1)]))
        yield OpenTrial(id=id, request_id=first.request_id, hparams=first.hparams, seed=first.seed, run_id=1)
        ledger.release()


def _spec(config: ExperimentConfig, stage: Home, machine: Machine, trial: OpenTrial, source: str | None) -> RunSpec:
    trial.placement = machine.placement([next(iter(machine.numbers))])
    spec = RunSpecs(1, config, stage, "cuda" if machine.gpus else "cpu", source).spec(trial)
    return dataclasses.replace(spec, environment={**spec.environment, TEST_VARIABLE: "1"})


def _in_this_process(spec: RunSpec) -> RunExit:
    executor = InlineExecutor()
    try:
        executor.start(spec)
        (ended,) = executor.poll(0.0)
        return ended
    finally:
        executor.close()


def _as_a_script(spec: RunSpec, variables: Mapping[str, str]) -> RunExit:
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
    status = status if status > 0 else _OF_SHELLS - status
    return RunExit.of(spec, EndReason.FAILED, f"the script ended with status {status}", status=status)
