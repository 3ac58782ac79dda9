"""The environment of a run's processes."""

from __future__ import annotations

import json
import pathlib
import shlex
import sys
from collections.abc import Mapping

from determined._home import HOME_VARIABLE, RUN_FOLDER_VARIABLE
from determined._info import ClusterInfo, TrialInfo
from determined.experiment.executors._base import RunSpec
from determined.launch._command import MODULE

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
SERVER_VARIABLE = "DET_WARM_PROCESS"
"""Marks all that was forked from one warm process."""

# fmt: off
_OF_ONE_TRAINING = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "DET_LAUNCH_COMMAND", RUN_FOLDER_VARIABLE,
    SERVER_VARIABLE,
}
# fmt: on


def base_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that runs share with the runner: none of a training that it may itself be part of."""
    trial = TrialInfo(trial_id=0, experiment_id=0, trial_seed=0, hparams={}, _config={})
    left_out = _OF_ONE_TRAINING | ClusterInfo(trial=trial, latest_checkpoint="any").to_environment().keys()
    is_shared = {name: name not in left_out and not name.startswith("TORCHELASTIC_") for name in variables}
    base = {name: value for name, value in variables.items() if is_shared[name]}
    if chosen := base.get(HOME_VARIABLE):  # one for all, wherever a run is
        base[HOME_VARIABLE] = str(pathlib.Path(chosen).expanduser().absolute())
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


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those variables of a run that matter already when libraries are loaded."""
    own = {name for name in environment if name.startswith("DET_")} | {GPU_VARIABLE}
    return {name: value for name, value in environment.items() if name not in own}


def rank_environment(environment: Mapping[str, str], spec: RunSpec, rank: int, port: int) -> dict[str, str]:
    """Return the variables of one of several ranks of a class, as our launcher would set them."""
    size = spec.ranks
    command = [sys.executable, "-m", MODULE, "--nproc-per-node", str(size), "--", "--trial", str(spec.entrypoint)]
    return {
        **environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": environment[RUN_FOLDER_VARIABLE],
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # The ranks meet at a store that is there already.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "DET_LAUNCH_COMMAND": shlex.join(command),
    }
