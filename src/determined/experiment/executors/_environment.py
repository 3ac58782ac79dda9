"""The environment, import path and command of a run's processes."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Mapping

from determined._database_location import located
from determined._home import DATABASE_VARIABLE, HOME_VARIABLE, RUN_FOLDER_VARIABLE
from determined._info import ClusterInfo, TrialInfo
from determined.experiment.executors._base import RunSpec
from determined.launch import HARNESS, MODULE

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
FORKSERVER_VARIABLE = "DET_FORKSERVER"
"""Marks all that was forked from one forkserver."""

# fmt: off
_OF_ONE_TRAINING = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "DET_LAUNCH_COMMAND", RUN_FOLDER_VARIABLE,
    FORKSERVER_VARIABLE,
}
# fmt: on


def base_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that runs share with the runner, without those of a training that it may be part of."""
    trial = TrialInfo(trial_id=0, experiment_id=0, trial_seed=0, hparams={}, _config={})
    left_out = _OF_ONE_TRAINING | ClusterInfo(trial=trial, latest_checkpoint="any").to_environment().keys()
    is_shared = {name: name not in left_out and not name.startswith("TORCHELASTIC_") for name in variables}
    base = {name: value for name, value in variables.items() if is_shared[name]}
    if chosen := base.get(HOME_VARIABLE):  # one for all, wherever a run is
        base[HOME_VARIABLE] = str(pathlib.Path(chosen).expanduser().absolute())
    if database := base.get(DATABASE_VARIABLE):
        base[DATABASE_VARIABLE] = str(located(database))
    return base


def run_environment(base: Mapping[str, str], spec: RunSpec) -> dict[str, str]:
    """Return the variables of a run."""
    threads = spec.environment.get(THREAD_VARIABLES[0], str(spec.placement.get("threads", 1)))
    slots = spec.placement.get("slots", [])
    return {
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns at length of a store whose process has ended
        **base,
        "PYTHONUNBUFFERED": "1",  # so that its output can be seen as it comes
        **dict.fromkeys(THREAD_VARIABLES, threads),
        **spec.environment,
        **({"DET_SLOT_IDS": json.dumps(slots)} if slots else {}),
        GPU_VARIABLE: ",".join(spec.placement.get("gpus", [])),
        RUN_FOLDER_VARIABLE: str(spec.folder.absolute()),
    }


def import_path(code: str, given: str) -> list[str]:
    """Return where to look for modules: in the code folder first, to which the folders of PYTHONPATH are relative."""
    folders = list(filter(None, given.split(os.pathsep)))
    # The process that this one was forked from took them as from its own working folder.
    theirs = {os.path.abspath(os.path.join(os.sep, folder)) for folder in folders}
    ours = [os.path.abspath(os.path.join(code, folder)) for folder in folders]
    return list(dict.fromkeys([code, *ours, *(entry for entry in sys.path if entry not in theirs)]))


def command_of(spec: RunSpec) -> list[str]:
    """Return the command that runs an entrypoint in a process of its own."""
    if not isinstance(spec.entrypoint, str):
        return list(spec.entrypoint)
    if not spec.is_class:
        return ["/bin/sh", "-c", spec.entrypoint]
    if spec.ranks == 1:
        return [sys.executable, "-m", HARNESS, "--trial", spec.entrypoint]
    ranks = ["--nproc-per-node", str(spec.ranks)]
    return [sys.executable, "-m", MODULE, *ranks, "--", "--trial", spec.entrypoint]
