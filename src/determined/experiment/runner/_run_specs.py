"""The runs of an experiment's trials: what each is started with."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from determined import errors, storage
from determined._home import Home
from determined._info import ClusterInfo, TrialInfo
from determined.experiment.config import ExperimentConfig
from determined.experiment.executors import Device, Placement, RunSpec
from determined.experiment.runner._trials import OpenTrial
from determined.tracking import CheckpointRecord, CheckpointState, TrackingReader

_NO_CHECKPOINT: Future[CheckpointRecord | None] = Future()
_NO_CHECKPOINT.set_result(None)


class Runs:
    """Makes the runs of trials, each from the newest intact checkpoint of its trial."""

    def __init__(self, experiment_id: int, config: ExperimentConfig, home: Home, device: Device) -> None:
        self._experiment_id = experiment_id
        self._config = config
        self._home = home
        self._as_map = config.to_dict()
        self._variables = config.environment.variables(device)
        self._source: str | None = None
        self._checker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checks checkpoints")
        self._checks: dict[int, Future[CheckpointRecord | None]] = {}

    def start_from(self, checkpoint: str | None) -> None:
        """Let the first runs of trials begin with the weights of a checkpoint."""
        self._source = checkpoint

    def is_ready(self, trial: OpenTrial) -> bool:
        """Return whether the next run of a trial can begin: not before its checkpoint is checked, on another thread."""
        return trial.run_id == 0 or self._check(trial).done()

    def next_run(self, trial: OpenTrial, placement: Placement) -> tuple[RunSpec, int]:
        """Return the run of a trial that begins now, and the step at which it does; waits if it is not ready."""
        own = self._check(trial).result() if trial.run_id > 1 else None
        self._checks.pop(trial.id, None)
        if own is not None:
            return self.spec(trial, placement, own.uuid, own.steps_completed), own.steps_completed
        return self.spec(trial, placement, self._source), 0

    def spec(
        self, trial: OpenTrial, placement: Placement, checkpoint: str | None = None, steps_completed: int = 0
    ) -> RunSpec:
        """Return a run of a trial at a placement, from a checkpoint with so many steps."""
        resources, config = self._config.resources, self._config
        return RunSpec(
            experiment_id=self._experiment_id,
            trial_id=trial.id,
            run_id=trial.run_id,
            entrypoint=config.trial_class or config.entrypoint or "",
            code=self._home.code(self._experiment_id),
            folder=self._home.run(self._experiment_id, trial.id, trial.run_id).path,
            environment={
                "PATH": _path(),
                **self._variables,
                "DET_HOME": str(self._home.path),
                **self._info(trial, checkpoint, steps_completed).to_environment(),
            },
            ranks=resources.slots_per_trial,
            placement=placement,
            grace_period=float(config.preemption_timeout),
            patterns=[policy.pattern for policy in config.log_policies if policy.pattern is not None],
        )

    def _info(self, trial: OpenTrial, checkpoint: str | None, steps: int) -> ClusterInfo:
        allocation = f"{self._experiment_id}.{trial.id}.{trial.run_id}"
        return ClusterInfo(
            trial=TrialInfo(
                trial_id=trial.id,
                experiment_id=self._experiment_id,
                trial_seed=trial.seed,
                hparams=dict(trial.hparams),
                _config=self._as_map,
                _steps_completed=steps,
                _trial_run_id=trial.run_id,
            ),
            latest_checkpoint=checkpoint,
            task_id=f"trial-{trial.id}",
            allocation_id=allocation,
            cluster_id="local",
            agent_id="local",
            container_slot_counts=[max(self._config.resources.slots_per_trial, 1)],
        )

    def _check(self, trial: OpenTrial) -> Future[CheckpointRecord | None]:
        """Return the newest intact checkpoint of a trial, or the promise of it."""
        if trial.id not in self._checks:
            saved = TrackingReader(self._home.database).checkpoints(self._experiment_id, trial.id)
            present = [one for one in saved if one.state is CheckpointState.COMPLETED]
            self._checks[trial.id] = self._checker.submit(_newest_intact, present) if present else _NO_CHECKPOINT
        return self._checks[trial.id]


def _newest_intact(checkpoints: Sequence[CheckpointRecord]) -> CheckpointRecord | None:
    return next(filter(_is_intact, reversed(checkpoints)), None)


def _path() -> str:
    """Return where programs are looked for: `python3` means this one, also in an environment that is not activated."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def _is_intact(checkpoint: CheckpointRecord) -> bool:
    folder = pathlib.Path(checkpoint.path)
    try:
        storage.Manifest.read(folder).verify(folder)
    except (errors.InvalidCheckpointException, OSError):
        return False
    return True
