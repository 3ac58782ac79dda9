"""Who takes part in benchmarks/peers.py, and how it talks to them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import _environments

RUNNERS = pathlib.Path(__file__).parent / "_peers"


@dataclasses.dataclass(frozen=True)
class Contender:
    """A training library, and the script that does the work with it."""

    name: str
    script: str
    requirement: str | None = None
    """What to install in an environment of its own; None to run in this one."""

    def command(self, python: str, *arguments: str) -> list[str]:
        return [python, str(RUNNERS / f"{self.script}.py"), *arguments]

    def environment(self) -> dict[str, str]:
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)  # each library starts from bytecode, as an installed one does
        paths = variables.pop("PYTHONPATH", "")
        if paths and self.requirement is None:  # absolute, since it runs in another folder
            variables["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
        return variables


PLAIN = Contender("plain", "plain")
OURS = Contender("Resolute", "ours")
PEERS = [
    Contender("Lightning", "lightning_trainer", "lightning"),
    Contender("Accelerate", "accelerate_loop", "accelerate"),
    Contender("Ignite", "ignite_engine", "pytorch-ignite"),
    Contender("HF Trainer", "hf_trainer", "transformers[torch]"),
]


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A contender with the interpreter to run it, and a folder for what it writes."""

    contender: Contender
    python: str
    folder: pathlib.Path

    @property
    def name(self) -> str:
        return self.contender.name

    @contextlib.contextmanager
    def process(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run the contender's script; what it says beside its answers goes to a log."""
        with (self.folder / "log.txt").open("a") as log:
            process = subprocess.Popen(
                self.contender.command(self.python, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.folder,
                env=self.contender.environment(),
            )
            with process:  # closes its input, which ends it, and waits
                yield process

    def answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        if line := process.stdout.readline():
            return dict(json.loads(line))
        log = (self.folder / "log.txt").read_text().splitlines()
        raise RuntimeError("\n".join([f"{self.name} ended without an answer; the end of its log is:", *log[-20:]]))

    def start(self, batches: int) -> dict[str, Any]:
        """Return the seconds from the start of a process to its first trained batch, and its peak memory."""
        began = time.monotonic()
        with self.process("start", str(batches)) as process:
            answer = self.answer(process)
        return {"wall": answer["moment"] - began, "cpu": answer["cpu"], "peak": answer["peak_kib"] / 1024}


class Worker:
    """A process of a contender that does jobs on request."""

    def __init__(self, entrant: Entrant, process: subprocess.Popen[str]) -> None:
        self.name = entrant.name
        self._entrant = entrant
        self._process = process
        self.introduction = entrant.answer(process)

    def can(self, job: str) -> bool:
        return job in self.introduction["jobs"]

    def ask(self, job: str, batches: int, *, check: bool = False) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps({"job": job, "batches": batches, "check": check}), file=self._process.stdin, flush=True)
        return self._entrant.answer(self._process)


@contextlib.contextmanager
def entered(contenders: list[Contender], environments: pathlib.Path) -> Iterator[list[Entrant]]:
    """Give those contenders that can be had, each with an environment; say who is left out and why."""
    shared = environments / "shared"
    if any(contender.requirement for contender in contenders):
        _environments.share(shared)
    with tempfile.TemporaryDirectory() as scratch:
        entrants = []
        for contender in contenders:
            try:
                python = _python_of(contender, environments, shared)
            except _environments.CannotInstall as error:
                print(f"{contender.name} is left out, since it cannot be installed: {error}", flush=True)
                continue
            folder = pathlib.Path(scratch, contender.script)
            folder.mkdir()
            entrants.append(Entrant(contender, python, folder))
        yield entrants


def _python_of(contender: Contender, environments: pathlib.Path, shared: pathlib.Path) -> str:
    if contender.requirement is None:
        return sys.executable
    return str(_environments.make(environments / contender.script, contender.requirement, shared).absolute())


@contextlib.contextmanager
def working(entrants: Sequence[Entrant]) -> Iterator[list[Worker]]:
    """Give a worker of each, all at once; refuse those with another torch."""
    with contextlib.ExitStack() as stack:
        workers = [Worker(entrant, stack.enter_context(entrant.process("serve"))) for entrant in entrants]
        for worker in workers:
            paths = [one.introduction["torch_path"] for one in (workers[0], worker)]
            if len(set(paths)) > 1:
                raise RuntimeError(f"{worker.name} uses the torch in {paths[1]}, not the one in {paths[0]}.")
        yield workers
