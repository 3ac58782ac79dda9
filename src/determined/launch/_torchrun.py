"""torchrun within this process: its options, with defaults that are known here, and its start of the ranks."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Callable
from typing import Any

from determined._info import ClusterInfo
from determined.launch import _keeper, _places
from determined.launch._command import MODULE, USAGE, UsageError

PATIENCE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_PATIENCE = 3600
_SCRIPT = "script.py"  # stands for it where only options are read
_TALKATIVE = {"LOGLEVEL", "TORCH_LOGS"}


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
        for name, value in _places.machines(info, os.environ).items():
            setattr(options, name, value)
    options.nproc_per_node = options.nproc_per_node or str(_places.processes_here(info))
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
        os.environ.setdefault("OMP_NUM_THREADS", str(_places.threads_for(processes)))
    try:
        return config_from_args(options)[0]
    except (AssertionError, RuntimeError) as error:
        raise UsageError(str(error)) from None


def patience_of(options: argparse.Namespace) -> float:
    """Return how many seconds ranks have to end after a signal."""
    given = getattr(options, "shutdown_timeout", None)  # not in every version of torch
    return float(os.environ.get(PATIENCE_VARIABLE, _PATIENCE) if given is None else given)


def starter(config: Any) -> Callable[[str], None]:
    """Return what starts keepers that listen to an address, and returns when all have ended."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    if not _TALKATIVE & os.environ.keys():
        # What it has to say of failed ranks, these have said better.
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def start(address: str) -> None:
        try:
            elastic_launch(config, sys.executable)("-I", "-S", _keeper.__file__, address)
        except ChildFailedError as error:
            raise ChildProcessError(f"ranks {sorted(error.failures)} could not be started.") from error

    return start


def _says_how_to_meet(options: argparse.Namespace) -> bool:
    given = (options.standalone, options.rdzv_endpoint, options.master_port, options.node_rank)
    return any(given) or options.rdzv_backend != "static" or options.nnodes not in ("1", "1:1")
