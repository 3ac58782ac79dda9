"""Several machines, here two launchers of one machine, and what Slurm and a runner tell of them."""

from __future__ import annotations

import json
import pathlib
import socket
from collections.abc import Callable

import pytest

import forking
from determined.launch.torch_distributed import main

pytestmark = pytest.mark.process

RUN = "import os; print('of', os.environ['WORLD_SIZE'], 'at', os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"


def by_options(port: int, node: int) -> tuple[list[str], dict[str, str]]:
    options = f"--nnodes 2 --node-rank {node} --master-addr 127.0.0.1 --master-port {port}"
    return options.split(), {}


def by_slurm(port: int, node: int) -> tuple[list[str], dict[str, str]]:
    step = {"STEP_NUM_TASKS": "2", "STEP_NUM_NODES": "2", "STEP_TASKS_PER_NODE": "1(x2)", "STEP_NODELIST": "127.0.0.1"}
    place = {"PROCID": str(node), "NODEID": str(node), "LOCALID": "0"}
    return [], {"WORLD_SIZE": "3", "MASTER_PORT": str(port), **{f"SLURM_{k}": v for k, v in (step | place).items()}}


@pytest.mark.parametrize("meeting", [by_options, by_slurm])
def test_ranks_count_on_over_machines(
    meeting: Callable[[int, int], tuple[list[str], dict[str, str]]],
    script: Callable[[str], str],
    start: Callable[..., forking.Process],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (first, variables), (second, of_second) = (meeting(port, node) for node in (0, 1))
    other = start("--nproc-per-node", "2", *second, "--", script(RUN), **of_second)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["--nproc-per-node", "1", *first, "--", "train.py"]) == 0
    assert capfd.readouterr().out == f"[rank=0] of 3 at 127.0.0.1 {port}\n"
    output, _ = other.communicate(timeout=60)
    # The other end may be gone before this one's torch lets go of it, which it then writes about.
    lines = sorted(line for line in output.splitlines() if line.startswith("[rank="))
    assert lines == [f"[rank={rank}] of 3 at 127.0.0.1 {port}" for rank in (1, 2)]
    assert other.returncode == 0


def managed(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    facts = {"DET_TRIAL_ID": "1", "DET_EXPERIMENT_ID": "1", "DET_TRIAL_SEED": "1", "DET_HPARAMS": "{}"}
    for name, value in (facts | variables).items():
        monkeypatch.setenv(name, value if isinstance(value, str) else json.dumps(value))


def test_managed_run_starts_one_process_a_slot(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    managed(monkeypatch, DET_SLOT_IDS=[4, 7, 8])
    assert main([script("print('here')")]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[rank={rank}] here" for rank in range(3)]


def test_managed_run_meets_at_its_chief(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Alone it cannot meet anybody: that it waits for another machine at that address is all to see here.
    addresses = ["127.0.0.1", "127.0.0.2"]
    managed(monkeypatch, DET_SLOT_IDS=[0], DET_CONTAINER_ADDRS=addresses, DET_CONTAINER_SLOT_COUNTS=[1, 1])
    monkeypatch.setenv("PET_RDZV_CONF", "timeout=1")
    assert main([script("print('here')")]) == 1
    assert "[launcher] " in capfd.readouterr().err


def test_srun_must_start_one_launcher_a_machine(
    project: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slurm = {"STEP_NUM_TASKS": "4", "PROCID": "1", "STEP_TASKS_PER_NODE": "2(x2)", "NODEID": "0", "LOCALID": "1"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert main(["true"]) == 2
    assert "use srun --ntasks-per-node=1" in capfd.readouterr().err
