"""What a job does on its first node: it runs one run of a trial with the executor of that node."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from determined._home import RunFolder, private_opener
from determined.experiment.executors._base import EndReason, RunExit, RunSpec
from determined.experiment.executors._environment import command_of
from determined.experiment.executors._exit_file import read_json, write_json
from determined.experiment.executors.local import LocalExecutor, this_machine
from determined.processes import call_arguments

STOP, KILL = "stop", "kill"
_POLL_S = 0.5
# From Slurm: SIGTERM before it kills a job, SIGUSR1 and SIGUSR2 as warnings before the time limit or a preemption.
_WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def run_job(folder: str) -> None:
    """Run what the spec in the folder of a run says to its end, and leave its exit there."""
    files = RunFolder(pathlib.Path(folder))
    spec = RunSpec.from_json(read_json(files.spec) or {})
    with _noting_warnings(files):
        _run(spec, files)


def _run(spec: RunSpec, files: RunFolder) -> None:
    if files.exit.exists():
        return  # Slurm has requeued a job whose run has ended
    if files.shim.exists():
        _note(files, "its node was lost")
        exit = RunExit.of(spec, EndReason.STOPPED, "its node was lost, and Slurm started its job again")
        write_json(files.exit, exit.to_json())
        return
    if last_order(files):
        write_json(files.exit, RunExit.of(spec, EndReason.KILLED, "before it had begun").to_json())
        return
    with LocalExecutor() as executor:
        executor.start(_on_these_nodes(spec))
        asked = ""
        while not executor.poll(_POLL_S):
            order = last_order(files) or (STOP if files.interrupted.exists() else "")
            if order and order != asked:
                asked = order
                executor.kill(spec.trial_id) if order == KILL else executor.stop(spec.trial_id)


def last_order(files: RunFolder) -> str:
    """Return what the runner wants of a run; empty if nothing but that it goes on."""
    try:
        words = files.orders.read_text(encoding="utf-8").split()
    except OSError:  # as on a file server that is away for a moment
        return ""
    return words[-1] if words else ""


@contextlib.contextmanager
def _noting_warnings(files: RunFolder) -> Iterator[None]:
    def note(signum: int, frame: FrameType | None) -> None:
        _note(files, f"Slurm sent {signal.Signals(signum).name}")

    before = {warning: signal.signal(warning, note) for warning in _WARNINGS}
    try:
        yield
    finally:
        for warning, handler in before.items():
            signal.signal(warning, handler)


def _note(files: RunFolder, why: str) -> None:
    with (
        contextlib.suppress(OSError),
        open(files.interrupted, "w", encoding="utf-8", opener=private_opener) as file,
    ):
        file.write(why)


def _on_these_nodes(spec: RunSpec) -> RunSpec:
    """Return the run as the executor of the first node is to start it, with what the job has there."""
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
    ranks = max(spec.ranks // nodes, 1)
    machine = this_machine(ranks)
    here = dataclasses.replace(spec, ranks=ranks, placement=machine.placement(list(machine.numbers)[:ranks]))
    if nodes == 1:
        return here
    step = call_arguments(f"{__package__}._step", *command_of(here))
    return dataclasses.replace(here, entrypoint=[sys.executable, *step])
