"""The runner of an experiment in the cluster: a detached actor whose child it is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from determined import errors
from determined._home import private_opener
from determined.experiment.executors._base import Job
from determined.experiment.executors.ray._ray import (
    actors_of,
    end_this_actor,
    joined,
    kill_actor,
    prefix_of,
    start_actor,
)
from determined.processes import call_arguments, end_with_parent

_ATTEMPTS = 5
_START_TIMEOUT_S = 60.0
_STATUS_TIMEOUT_S = 10.0
_ASK_INTERVAL_S = 2.0
_MAX_DELAY_S = 60.0
_CLAIM_TIMEOUT_S = 150.0
"""Seconds after which a claim of a runner on another node has expired."""
_RETRY_S = 10.0


@dataclasses.dataclass(slots=True)
class RayRunner:
    """A runner that was just started in the cluster."""

    pid: int
    name: str
    address: str
    status: int | None = None
    asked_at: float = dataclasses.field(default_factory=time.monotonic)

    def poll(self) -> int | None:
        """Return 1 if its actor is gone, its exit status if it has ended, and else None: also between two questions."""
        # To join the cluster takes a while, in which a runner has usually claimed its experiment.
        if self.status is None and time.monotonic() - self.asked_at >= _ASK_INTERVAL_S:
            with joined(self.address) as ray:
                self.status = _status_of(actors_of(self.name).get(self.name), ray)
            self.asked_at = time.monotonic()
        return self.status


def _status_of(actor: Any, ray: Any) -> int | None:
    if actor is None:
        return 1
    try:
        status: int | None = ray.get(actor.call.remote("status"), timeout=_STATUS_TIMEOUT_S)
    except ray.exceptions.RayError:
        return 1
    return status


def start_runner(
    command: Sequence[str], environment: Mapping[str, str], job: Job, node: str | None, address: str
) -> RayRunner:
    """Start the actor of a runner on a node, or find it."""
    import ray

    name = f"{prefix_of(job.home, job.experiment_id)}runner"
    log, home = str(job.home.runner_log(job.experiment_id)), str(job.home.path)
    for _ in range(_ATTEMPTS):
        actor = start_actor(
            name, node, __name__, "RunnerActor", list(command), dict(environment), home, log, restarts=-1
        )
        try:
            return RayRunner(ray.get(actor.call.remote("pid"), timeout=_START_TIMEOUT_S), name, address)
        except ray.exceptions.RayTaskError as error:
            kill_actor(actor)
            raise errors.InternalException(f"the runner cannot be started: {error.cause}") from error
        except ray.exceptions.RayError as error:  # one that was about to end
            if "creation task" in str(error):
                line = str(error).strip().rpartition("\n")[2]
                raise errors.InternalException(f"the runner cannot be started on the cluster: {line}") from error
            time.sleep(0.2)
    raise errors.InternalException(f"the actor {name} does not start; `ray list actors` says more.")


class RunnerActor:
    """Starts the runner, starts it again if it is killed, and ends with it. Ray starts this again if it is killed."""

    def __init__(self, command: list[str], environment: dict[str, str], home: str, log: str) -> None:
        if not os.path.isdir(home):
            raise FileNotFoundError(
                f"the home folder {home} is not on node {os.uname().nodename}; set DET_HOME to a folder that the nodes "
                "of the cluster share, or create the experiment on a node"
            )
        self._command, self._environment, self._home, self._log = command, environment, home, pathlib.Path(log)
        self._pid: int | None = None
        self._status: int | None = None
        self._has_started = threading.Event()
        # The child ends with the thread that starts it.
        threading.Thread(target=self._watch, name="watches the runner", daemon=True).start()

    def pid(self) -> int:
        """Return the process id of the runner."""
        self._has_started.wait(_START_TIMEOUT_S)
        assert self._pid is not None
        return self._pid

    def status(self) -> int | None:
        """Return the exit status of the runner; None while it lives."""
        return self._status

    def _watch(self) -> None:
        delay, began = 1.0, time.monotonic()
        while True:
            try:
                status = self._run()
            except OSError:  # the home folder is gone
                status = 1
            # One that was killed, or that found the claim of a runner on a lost node, which has yet to expire.
            waits = _was_restarted() and status == 1 and time.monotonic() - began < _CLAIM_TIMEOUT_S
            if status >= 0 and not waits:
                break
            time.sleep(_RETRY_S if waits else delay)
            delay = min(2 * delay, _MAX_DELAY_S)
        self._status = status
        time.sleep(1.0)  # so that whoever has started it can ask for the status
        end_this_actor()

    def _run(self) -> int:
        arguments = call_arguments(__name__, str(os.getpid()), *self._command)
        with open(self._log, "ab", opener=private_opener) as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**_of_ray(), **self._environment},
                cwd=self._home,
                start_new_session=True,
            )
        self._pid = process.pid
        self._has_started.set()
        return process.wait()


def _was_restarted() -> bool:
    import ray

    with contextlib.suppress(Exception):
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
    return False


def _of_ray() -> dict[str, str]:
    """Return what a process needs to join the cluster, such as its token."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}


def main(parent: str, *command: str) -> Any:
    """Become a program that ends with the process `parent`."""
    end_with_parent(int(parent))
    os.execv(command[0], command)
