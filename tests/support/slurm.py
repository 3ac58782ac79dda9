"""A real Slurm for tests: a controller and two nodes, all of them on this machine and in folders of their own."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

import psutil
import pytest

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 20.0
# Nodes are called by addresses, so that the ranks of a job find its first node without a name server. A requeued job
# begins when the credential of its first run has expired.
_CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=20
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
ReturnToService=2
KillWait=20
SlurmdTimeout=60
MailProg=/bin/true
PropagateResourceLimits=NONE
NodeName=127.0.0.[1-2] NodeHostname=localhost NodeAddr=127.0.0.[1-2] Port=[{first}-{second}] CPUs=4 RealMemory=16000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP
"""


class Slurm:
    """A running Slurm with two nodes of four CPUs each. Commands find it by the variable SLURM_CONF."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self._controller: subprocess.Popen[bytes] | None = None
        self._nodes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the controller and the nodes; returns when both nodes are idle."""
        controller, first = _free_ports()
        ports = {"controller": controller, "first": first, "second": first + 1}
        user = psutil.Process().username()
        self.config.write_text(_CONFIG.format(folder=self.folder, user=user, **ports))
        for folder in ("state", "spool-127.0.0.1", "spool-127.0.0.2"):
            (self.folder / folder).mkdir()
        self.start_controller("-c")
        self._nodes = [self._daemon("slurmd", "-N", f"127.0.0.{number}") for number in (1, 2)]
        self._await("idle")

    def stop(self) -> None:
        """Kill the daemons, the jobs and whatever they have left."""
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while (found := self.processes()) and time.monotonic() < deadline:
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        for daemon in filter(None, [*self._nodes, self._controller]):
            daemon.wait(_STOP_TIMEOUT_S)
        assert not found, found

    def start_controller(self, *options: str) -> None:
        self._controller = self._daemon("slurmctld", *options)
        self._await("")

    def stop_controller(self) -> None:
        """End the controller; jobs go on."""
        assert self._controller is not None
        self._controller.kill()
        self._controller.wait()

    def processes(self) -> list[psutil.Process]:
        """Return the processes of this Slurm and of its jobs."""
        return [one for one in psutil.process_iter() if one.pid != os.getpid() and self._has(one)]

    def _has(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if process.environ().get("SLURM_CONF") == str(self.config):
                return True
            # Daemons of jobs hide their environment; they write to the log of their node.
            return any(pathlib.Path(file.path).is_relative_to(self.folder) for file in process.open_files())
        return False

    def run(self, *command: str, cwd: pathlib.Path | None = None) -> str:
        """Return what a command of Slurm prints."""
        ended = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60)
        if ended.returncode:
            raise subprocess.SubprocessError(f"{command}: {ended.stderr}")
        return ended.stdout.strip()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.config)}

    def jobs(self) -> dict[str, str]:
        """Return the states of all jobs that have not ended, by id."""
        listed = self.run("squeue", "--noheader", "--format=%i %T")
        return dict(line.split() for line in listed.splitlines())

    def end_jobs(self) -> None:
        """Kill all jobs, and wait until they are gone."""
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while jobs := self.jobs():
            with contextlib.suppress(subprocess.SubprocessError):
                self.run("scancel", *jobs)
                self.run("scancel", "--full", "--signal=KILL", *jobs)
            assert time.monotonic() < deadline, jobs
            time.sleep(0.1)

    def _daemon(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "daemons.txt", "ab") as output:
            return subprocess.Popen(
                [program, "-D", "-f", self.config, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Not those of the test that starts a daemon again: it outlives that.
                env={name: value for name, value in self.environment.items() if not name.startswith("DET_")},
                start_new_session=True,
            )

    def _await(self, state: str) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(subprocess.SubprocessError):
                if all(line == state for line in self.run("sinfo", "--noheader", "--format=%T").split() if state):
                    return
            if time.monotonic() > deadline:
                raise TimeoutError((self.folder / "daemons.txt").read_text(errors="replace")[-2000:])
            time.sleep(0.05)


def _free_ports() -> tuple[int, int]:
    """Return a port for the controller and the first of two neighbours for the nodes, below those that systems give."""
    base = 10_000 + os.getpid() % 9_000
    for port in range(base, base + 1000, 3):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for each in range(port, port + 3):
                held.enter_context(socket.create_server(("127.0.0.1", each)))
            return port, port + 1
    raise OSError("no three free ports in a row")


@contextlib.contextmanager
def running() -> Iterator[Slurm]:
    """Give a Slurm for a block, or skip the tests where it cannot be had."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"Slurm is not installed: {', '.join(missing)} missing (Debian: slurm-wlm)")
    if os.geteuid():
        pytest.skip("slurmd needs root")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: it has sockets
    slurm = Slurm(folder)
    try:
        try:
            slurm.start()
        except (OSError, TimeoutError) as error:
            pytest.skip(f"Slurm does not start here: {error}")
        yield slurm
    finally:
        slurm.stop()
        shutil.rmtree(folder, ignore_errors=True)
