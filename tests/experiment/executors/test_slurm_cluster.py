"""What runs on a Slurm cluster and what does not, by what its commands say of its nodes."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import psutil
import pytest

from determined import errors
from determined._home import home
from determined.experiment import config as configs
from determined.experiment.executors import Job, connect

pytest.importorskip("submitit", reason="the extra slurm is not installed")


@pytest.fixture
def commands(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder of programs, the only one on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write(folder: pathlib.Path, *lines: str) -> None:
    """Write commands of a Slurm whose nodes are these, as `sinfo` prints them."""
    for name in ("sbatch", "squeue", "scancel", "sinfo"):
        said = "".join(f"echo '{line}'\n" for line in lines if name == "sinfo")
        (folder / name).write_text(f"#!/bin/sh\n{said}")
        (folder / name).chmod(0o755)


def config(slots: Any, **slurm: Any) -> configs.ExperimentConfig:
    searcher = {"name": "single", "metric": "loss"}
    return configs.from_map({"searcher": searcher, "slurm": slurm, "resources": {"slots_per_trial": slots}})


CPUS = ["main*|2|4|(null)", "big|1|64|(null)"]
GPUS = ["main*|2|64|gpu:a100:8(S:0-1)", "main*|1|64|gpu:h100:4,shard:2", "login|1|8|(null)"]


def taken(nodes: configs.ExperimentConfig, slots: int) -> tuple[int, str, int]:
    """Return the capacity of a partition, what its slots are, and how many of `slots` a trial gets."""
    with connect("slurm").open(Job(experiment_id=1, config=nodes, home=home())) as (allocator, _):
        placement = allocator.take(1, slots)
        return allocator.capacity, allocator.device, len(placement["slots"]) if placement else 0


@pytest.mark.parametrize(
    ("lines", "slots", "slurm", "expected"),
    [
        (CPUS, 8, {}, (8, "cpu", 8)),
        (CPUS, 64, {"sbatch_args": ["--partition=big"]}, (72, "cpu", 64)),  # the stub lists all partitions
        (GPUS, 16, {}, (20, "cuda", 16)),
        (GPUS, 4, {"gpu_type": "h100"}, (4, "cuda", 4)),
        (GPUS, {"min": 2, "max": 24}, {"slots_per_node": 4}, (20, "cuda", 12)),
    ],
)
def test_slots_spread_over_nodes(
    commands: pathlib.Path, lines: list[str], slots: Any, slurm: Mapping[str, Any], expected: tuple[int, str, int]
) -> None:
    write(commands, *lines)
    wanted = config(slots, **slurm)
    connect("slurm").check(wanted)
    assert taken(wanted, wanted.resources.slot_range.max) == expected


@pytest.mark.parametrize(
    ("lines", "slots", "slurm", "message"),
    [
        (CPUS, 9, {}, "slots_per_trial=9 does not fit.*nodes with 4, 4 CPUs.*--partition=NAME"),
        (CPUS, 5, {}, "slots_per_trial=5 does not fit"),
        (GPUS, 16, {"slots_per_node": 16}, "with slurm.slots_per_node=16 does not fit"),
        (CPUS, 1, {"gpu_type": "a100"}, "gpu_type='a100': no node of the partition"),
        (["big|1|64|(null)"], 1, {}, "no default partition; name one"),
    ],
)
def test_trials_that_fit_nowhere_are_refused(
    commands: pathlib.Path, lines: list[str], slots: int, slurm: Mapping[str, Any], message: str
) -> None:
    write(commands, *lines)
    with pytest.raises(errors.InvalidExperimentException, match=message):
        connect("slurm").check(config(slots, **slurm))


def test_slurm_is_needed(commands: pathlib.Path) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=r"sbatch, squeue.* on PATH.*login node"):
        connect("slurm").check(config(1))


def test_slurm_has_no_address(commands: pathlib.Path) -> None:
    with pytest.raises(errors.InvalidExperimentException, match="on='slurm:7': Slurm has no address"):
        connect("slurm:7")


class Mount(NamedTuple):
    mountpoint: str
    fstype: str


def test_one_sqlite_file_for_several_machines_is_refused(
    commands: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(commands, *CPUS)
    mounts = [Mount("/", "ext4"), Mount(str(home().path), "nfs4")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    remedy = re.escape("is on nfs4, where several nodes cannot write to one SQLite file; set DET_DATABASE=postgresql:")
    with pytest.raises(errors.InvalidExperimentException, match=remedy):
        connect("slurm").check(config(1))
    monkeypatch.setenv("DET_DATABASE", "postgresql://me@host/name")
    connect("slurm").check(config(1))


@pytest.mark.parametrize(
    ("option", "message"),
    [("-p gpu", "not a long option of sbatch"), ("--nodes=2", "--nodes follows from slots_per_trial")],
)
def test_options_of_sbatch_that_would_be_lost_are_refused(option: str, message: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=message):
        config(1, sbatch_args=[option])
