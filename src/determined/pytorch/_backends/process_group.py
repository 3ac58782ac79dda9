"""Join the processes that a launcher started for one training."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from determined._slurm import translate_slurm
from determined.core import DistributedContext
from determined.core.distributed import listen, timeout_seconds
from determined.pytorch._backends.base import Backend, SingleProcess
from determined.pytorch._backends.ddp import NoGroup, Replicas

BACKEND_VARIABLE = "DET_DISTRIBUTED_BACKEND"

_group_numbers = itertools.count()


@contextlib.contextmanager
def joined(given: DistributedContext | None) -> Iterator[tuple[DistributedContext, Backend]]:
    """Join the other processes; a process group that this sets up is taken down after the block.

    Ranks come from the context that the program gives, else from its process group, else from the launcher.
    """
    translate_slurm(os.environ)
    is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 or "TORCHELASTIC_RUN_ID" in os.environ
    with contextlib.ExitStack() as stack:
        if given is None and is_launched and not _has_group():
            stack.enter_context(_process_group())
        distributed = _ranks_of_group() if given is None else given
        yield distributed, _backend_for(distributed)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _ranks_of_group() -> DistributedContext:
    if not _has_group():
        return DistributedContext.single()
    if "LOCAL_RANK" in os.environ:
        _use_device(int(os.environ["LOCAL_RANK"]))  # before nccl exchanges objects
    return DistributedContext.from_torch_distributed()


def _backend_for(distributed: DistributedContext) -> Backend:
    if distributed.size == 1:
        return SingleProcess()
    device = _use_device(distributed.local_rank)
    return Replicas(device) if _has_group() else NoGroup(device, distributed.size)


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """Set up the process group that the launcher's environment describes."""
    device = _use_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = os.environ.get(BACKEND_VARIABLE) or ("nccl" if device.type == "cuda" else "gloo")
    hook = sys.excepthook
    timeout = datetime.timedelta(seconds=timeout_seconds())
    store, rank, size = _narrow_store(timeout) or next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # A prefix for each group of a program: the store still holds the addresses of the previous group.
    store = dist.distributed_c10d.PrefixStore(f"determined-{next(_group_numbers)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    if "DET_LAUNCH_COMMAND" in os.environ:
        sys.excepthook = hook  # torch's hook prefixes each line of a traceback with the rank, as our launcher does
    failed = True
    try:
        yield
        failed = False
    except SystemExit as leaving:
        # Above 128: a signal stopped the run. Other codes are those of a failure, here or on another rank.
        failed = leaving.code not in (None, 0) and not (isinstance(leaving.code, int) and leaving.code > 128)
        raise
    finally:
        if dist.is_initialized():
            _leave_group(failed)


def _leave_group(failed: bool) -> None:
    """Take the process group down; after a failure without waiting for the other ranks, which may never answer."""
    if not failed:
        dist.destroy_process_group()
    elif "nccl" in dist.get_backend():  # otherwise torch warns at exit that the group was not destroyed
        dist.distributed_c10d._abort_process_group()


def _narrow_store(timeout: datetime.timedelta) -> tuple[Any, int, int] | None:
    """Return the store that this rank serves, listening only at the address that the ranks use.

    Returns None if ranks may be on other machines, if another process serves the store, or if the address is not local:
    then torch creates the store, which listens on all interfaces.
    """
    variables = os.environ
    size, is_served = variables.get("WORLD_SIZE", ""), variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if variables.get("RANK") != "0" or variables.get("LOCAL_WORLD_SIZE") != size or is_served:
        return None
    host, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    try:
        listen_fd = listen(host, int(port)).detach()
    except (OSError, ValueError):
        return None
    serve = dist.TCPStore  # type: ignore[attr-defined]  # as documented
    return serve(host, int(port), int(size), True, timeout, multi_tenant=True, master_listen_fd=listen_fd), 0, int(size)


def _use_device(local_rank: int) -> torch.device:
    """Return the device of a process: its own GPU, which becomes the current one, or the CPU where there are none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and "SLURM_PROCID" in os.environ:  # each task of `srun --gpus-per-task=1` sees its own GPU alone
        local_rank = 0
    if local_rank >= count:
        raise RuntimeError(
            f"This machine has {count} GPUs, but the process of local rank {local_rank} needs one of its own; start "
            f"{count} processes on it (torchrun --nproc-per-node {count}), or set CUDA_VISIBLE_DEVICES='' to train on "
            "the CPU."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
