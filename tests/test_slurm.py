"""Processes that Slurm's `srun` starts know their place without torchrun."""

from __future__ import annotations

import pytest

from determined._slurm import tasks_per_node, translate_slurm

# As of a step `srun --nodes=4 --ntasks=7 --gpus-per-node=2`, on the second machine of it.
STEP = {
    "SLURM_JOB_ID": "812345",
    "SLURM_JOBID": "812345",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],login1",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_NTASKS": "9",
    "SLURM_TASKS_PER_NODE": "2(x4),1",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURMD_NODENAME": "gpu08",
}
# The same job's batch script, which is one process on the first machine.
BATCH = {
    "SLURM_JOB_ID": "812345",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],login1",
    "SLURM_NNODES": "5",
    "SLURM_NTASKS": "9",
    "SLURM_NPROCS": "9",
    "SLURM_TASKS_PER_NODE": "2(x4),1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


def translated(variables: dict[str, str], *without: str, **others: str) -> dict[str, str]:
    """Return the variables that are new or other after the translation."""
    before = {name: value for name, value in (variables | others).items() if name not in without}
    after = dict(before)
    translate_slurm(after)
    return {name: value for name, value in after.items() if before.get(name) != value}


def test_step_becomes_what_torchrun_would_say() -> None:
    assert translated(STEP) == {
        "RANK": "3",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(20_000 + (812345 * 16 + 3) % 12_000),
    }


def test_machine_with_fewer_processes_has_its_own_number() -> None:
    found = translated(STEP, SLURM_NODEID="3", SLURM_PROCID="6", SLURM_LOCALID="0")
    assert (found["RANK"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("6", "0", "1")


def test_batch_script_is_one_process() -> None:
    assert translated(BATCH) == {}


def test_step_of_one_task_is_one_process() -> None:
    assert translated(STEP, SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0") == {}


def test_ranks_of_torchrun_under_srun_stay_as_they_are() -> None:
    assert translated(STEP, RANK="5", WORLD_SIZE="16") == {}


def test_size_that_was_set_for_something_else_is_left_alone() -> None:
    assert translated(STEP, WORLD_SIZE="56") == {}


def test_what_a_batch_script_has_chosen_stays() -> None:
    found = translated(STEP, WORLD_SIZE="7", MASTER_ADDR="10.1.2.3", MASTER_PORT="29500")
    assert found["RANK"] == "3"
    assert not {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & found.keys()


def test_processes_spread_evenly_where_slurm_does_not_say_how() -> None:
    def place(node: str) -> tuple[str, str]:
        found = translated(STEP, "SLURM_STEP_TASKS_PER_NODE", SLURM_NODEID=node)
        return found["LOCAL_WORLD_SIZE"], found["GROUP_WORLD_SIZE"]

    assert [place(node) for node in "0123"] == [("2", "4"), ("2", "4"), ("2", "4"), ("1", "4")]


def test_few_variables_are_enough() -> None:
    assert translated({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "20000",
    }


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu09", "gpu07"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("login1,gpu[07-09]", "login1"),
        ("rack[1-2]node[007-009]", "rack1node007"),
        ("gpu[1,3]-ib0.cluster.example.com", "gpu1-ib0.cluster.example.com"),
        ("node-a-1", "node-a-1"),
    ],
)
def test_first_host_is_the_meeting_point(hosts: str, first: str) -> None:
    assert translated(STEP, SLURM_STEP_NODELIST=hosts)["MASTER_ADDR"] == first


def test_hosts_of_the_job_serve_where_those_of_the_step_are_missing() -> None:
    assert translated(STEP, "SLURM_STEP_NODELIST", SLURM_JOB_NODELIST="a[3-4]")["MASTER_ADDR"] == "a3"


def test_steps_and_jobs_have_ports_of_their_own_below_those_that_systems_hand_out() -> None:
    jobs = [{"SLURM_JOB_ID": str(812345 + job), "SLURM_STEP_ID": str(step)} for job in range(9) for step in range(16)]
    ports = {int(translated(STEP, **job)["MASTER_PORT"]) for job in jobs}
    assert len(ports) == len(jobs)
    assert min(ports) >= 20_000
    assert max(ports) < 32_768


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,3(x2)", [1, 3, 3]), ("8(x2)", [8, 8]), ("", [])]
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts
