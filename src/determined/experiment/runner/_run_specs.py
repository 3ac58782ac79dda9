"""What the runs of an experiment's trials are started with."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from determined import errors, storage
from determined._home import Home
from determined._info import ClusterInfo, TrialInfo
from determined.core.checkpoint_gc import finish_uploads
from determined.experiment.config import ExperimentConfig
from determined.experiment.executors import Device, RunSpec
from determined.experiment.runner._state import OpenTrial
from determined.tracking import CheckpointRecord, CheckpointState, TrackingReader

logger = logging.getLogger("determined.experiment")


class RunSpecs:
    """Makes the specs of the runs of an experiment's trials."""

    def __init__(
        self, experiment_id: int, config: ExperimentConfig, home: Home, device: Device, source: str | None = None
    ) -> None:
        """Let trials without a checkpoint of their own start from the weights of the checkpoint `source`."""
        self._experiment_id = experiment_id
        self._config = config
        self._home = home
        self._tree = config.to_dict()
        self._variables = config.environment.variables(device)
        self._source = source
        self._store = storage.store_for(self._tree["checkpoint_storage"], home.checkpoints)

    def spec(self, trial: OpenTrial) -> RunSpec:
        """Return the latest run of a trial, at its placement and from its checkpoint."""
        config = self._config
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
                **storage.environment_for(self._store.location),
                **self._home.variables,
                **self._info(trial).to_environment(),
            },
            ranks=trial.slots,
            placement=trial.placement or {},
            grace_period=float(config.preemption_timeout),
            patterns=[policy.pattern for policy in config.log_policies if policy.pattern is not None],
        )

    def _info(self, trial: OpenTrial) -> ClusterInfo:
        return ClusterInfo(
            trial=TrialInfo(
                trial_id=trial.id,
                experiment_id=self._experiment_id,
                trial_seed=trial.seed,
                hparams=dict(trial.hparams),
                _config=self._tree,
                _steps_completed=trial.checkpoint.steps_completed if trial.checkpoint else 0,
                _trial_run_id=trial.run_id,
            ),
            latest_checkpoint=trial.checkpoint.uuid if trial.checkpoint else self._source,
            task_id=f"trial-{trial.id}",
            allocation_id=f"{self._experiment_id}.{trial.id}.{trial.run_id}",
            cluster_id="local",
            agent_id="local",
            container_slot_counts=[trial.slots],
        )


class CheckpointFinder:
    """Finds the newest intact checkpoints of trials, on a thread of its own since it reads whole files."""

    def __init__(self, experiment_id: int, home: Home) -> None:
        self._experiment_id = experiment_id
        self._home = home
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checks checkpoints")
        self._wanted: dict[int, Future[CheckpointRecord | None]] = {}

    def find(self, trial_id: int) -> None:
        """Begin to look for the checkpoint of a trial; `found` returns it later."""
        self._wanted[trial_id] = self._thread.submit(self._newest, trial_id, self._present(trial_id))

    def found(self) -> dict[int, CheckpointRecord | None]:
        """Return what was found since the last call, by trial id: None for a trial without an intact checkpoint."""
        done = {trial_id: future.result() for trial_id, future in self._wanted.items() if future.done()}
        for trial_id in done:
            del self._wanted[trial_id]
        return done

    def _present(self, trial_id: int) -> list[CheckpointRecord]:
        saved = TrackingReader(self._home.database).checkpoints(self._experiment_id, trial_id)
        return [one for one in saved if one.state is CheckpointState.COMPLETED]

    def _newest(self, trial_id: int, present: Sequence[CheckpointRecord]) -> CheckpointRecord | None:
        """Return the newest intact one, after uploading what killed runs have saved on this machine, which is newer."""
        if storage.abandoned_uploads(self._home.stores):
            try:
                finish_uploads(self._home)
                present = self._present(trial_id)
            except (errors.StorageException, errors.TrackingException) as error:
                logger.warning("checkpoints of killed runs could not be uploaded: %s", error)
        return next(filter(_is_intact, reversed(present)), None)


def _path() -> str:
    """Return PATH with the folder of this Python first, so that `python3` means it without an activated environment."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def _is_intact(checkpoint: CheckpointRecord) -> bool:
    try:
        with storage.open_at(checkpoint.path) as saved:
            saved.verify()
    except (errors.InvalidCheckpointException, OSError):
        return False
    return True
