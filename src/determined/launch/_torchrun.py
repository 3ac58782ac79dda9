"""torchrun within this process: its options, with defaults that are known here, and its start of the ranks."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from determined._info import ClusterInfo
from determined._slurm import translate_slurm
from determined.launch._command import MODULE, USAGE, UsageError
from determined.launch._supervisor import say
from determined.processes import call_arguments

GRACE_PERIOD_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_GRACE_PERIOD_S = 3600
_SCRIPT = "script.py"  # stands for it where only options are read
_FIRST_PORT = 20_000
_PORTS = 12_000  # below those that systems hand out by themselves
_VERBOSE = {"LOGLEVEL", "TORCH_LOGS"}


def read_options(words: list[str], info: ClusterInfo | None) -> argparse.Namespace:
    """Return torchrun's options, with what is known here in place of its defaults."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog, parser.usage = MODULE, USAGE
    parser.set_defaults(
        master_port=os.environ.get("PET_MASTER_PORT"), nproc_per_node=os.environ.get("PET_NPROC_PER_NODE")
    )
    options = parser.parse_args([*words, _SCRIPT])
    if options.training_script != _SCRIPT or options.training_script_args:
        raise UsageError(f"{options.training_script!r} before -- is not an option of torchrun.")
    if not _says_how_to_meet(options):
        machines = _of_slurm(os.environ) if info is None else _of_runner(info)
        for name, value in machines.items():
            setattr(options, name, value)
    options.nproc_per_node = options.nproc_per_node or str(_processes_here(info))
    return options


def launch_config(options: argparse.Namespace, folder: str) -> Any:
    """Return what torchrun would make of the options; files that nobody asks for go into `folder`."""
    from torch.distributed.run import config_from_args, determine_local_world_size

    if options.standalone or not _says_how_to_meet(options):
        from determined.launch import _rendezvous

        _rendezvous.register()
        options.rdzv_backend, options.rdzv_endpoint = _rendezvous.BACKEND, _rendezvous.ENDPOINT
        options.rdzv_id = str(uuid.uuid4())
        options.standalone = False  # else torchrun takes a backend of its own
        options.local_addr = options.local_addr or "127.0.0.1"
    options.master_port = int(options.master_port or 29500)
    options.log_dir = options.log_dir or folder
    processes = determine_local_world_size(options.nproc_per_node)
    if processes < 1:
        raise UsageError(f"--nproc-per-node {options.nproc_per_node} starts nothing; give a number of at least 1.")
    if processes > 1:  # one alone takes all cores anyway
        os.environ.setdefault("OMP_NUM_THREADS", str(_threads_for(processes)))
    try:
        return config_from_args(options)[0]
    except (AssertionError, RuntimeError) as error:
        raise UsageError(str(error)) from None


def grace_period_of(options: argparse.Namespace) -> float:
    """Return how many seconds ranks have to end after a signal."""
    given = getattr(options, "shutdown_timeout", None)  # not in every version of torch
    return float(os.environ.get(GRACE_PERIOD_VARIABLE, _GRACE_PERIOD_S) if given is None else given)


def starter(config: Any) -> Callable[[str], None]:
    """Return a function that starts the shims of the ranks for an address, and returns when all have ended."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    if not _VERBOSE & os.environ.keys():
        # What it has to say of failed ranks, these have said better.
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def start(address: str) -> None:
        try:
            elastic_launch(config, sys.executable)("-I", "-S", *call_arguments("determined.launch._rank_shim", address))
        except ChildFailedError as error:
            raise ChildProcessError(f"ranks {sorted(error.failures)} could not be started.") from error

    return start


def _processes_here(info: ClusterInfo | None) -> int:
    """Return how many processes to start by default: one per slot of a managed run, else one per GPU, else one."""
    if info is not None:
        return max(len(info.slot_ids), 1)
    import torch

    if gpus := torch.cuda.device_count():
        return gpus
    say(f"no GPU here, so 1 process starts. For more: python -m {MODULE} --nproc-per-node 4 -- ...")
    return 1


def _of_runner(info: ClusterInfo) -> dict[str, Any]:
    """Return torchrun's options for a training on several machines that a runner describes; else none."""
    if len(info.container_addrs) < 2:
        return {}
    return {
        "nnodes": str(len(info.container_addrs)),
        "node_rank": info.container_rank,
        "master_addr": info.container_addrs[0],
        # Trainings that share a machine need ports of their own.
        "master_port": _FIRST_PORT + zlib.crc32(info.allocation_id.encode()) % _PORTS,
    }


def _of_slurm(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return torchrun's options for a training on several machines that `srun` describes; else none."""
    # A batch script may have set the size for the ranks that are to be started here.
    variables = {name: value for name, value in environment.items() if name != "WORLD_SIZE"}
    translate_slurm(variables)
    if "RANK" in environment or "RANK" not in variables:
        return {}
    if variables["WORLD_SIZE"] != variables["GROUP_WORLD_SIZE"]:
        raise UsageError(
            f"srun started {variables['WORLD_SIZE']} of these on {variables['GROUP_WORLD_SIZE']} machine(s), but one "
            "starts all processes of its machine: use srun --ntasks-per-node=1, or let srun start the script itself."
        )
    return {
        "nnodes": variables["GROUP_WORLD_SIZE"],
        "node_rank": int(variables["GROUP_RANK"]),
        "master_addr": variables["MASTER_ADDR"],
        "master_port": int(variables["MASTER_PORT"]),
    }


def _threads_for(processes: int) -> int:
    """Return how many threads each of `processes` may compute with."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def _says_how_to_meet(options: argparse.Namespace) -> bool:
    given = (options.standalone, options.rdzv_endpoint, options.master_port, options.node_rank)
    return any(given) or options.rdzv_backend != "static" or options.nnodes not in ("1", "1:1")
