"""Several ranks of one job: as processes of their own, or as threads where processes make no difference."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import determined
import forking
from determined import core

SOURCES = pathlib.Path(determined.__file__).parents[1]
SECONDS = 60.0

PRELUDE = """
import json, os, sys
import torch.distributed  # which takes seconds, and not every rank the same
from determined import core, errors
print("imported", flush=True)
sys.stdin.readline()
context = core.DistributedContext(**json.loads(sys.argv[1]))
rank = context.rank
def say(*words):
    # In one piece, also where a forked child writes at the same time.
    os.write(1, " ".join(map(str, words)).replace(chr(10), " ").encode() + b"%c" % 10)
def hear():
    return sys.stdin.readline()
def outcome(call, *items):
    try:
        return repr(call(*items))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def numbers(rank: int, size: int, machines: int = 1) -> dict[str, int]:
    """The six numbers of a rank, with as many ranks on each machine."""
    there = size // machines
    return {
        "rank": rank,
        "size": size,
        "local_rank": rank % there,
        "local_size": there,
        "cross_rank": rank // there,
        "cross_size": machines,
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def start_process(command: Sequence[str], **options: Any) -> Any:
    """Start a command as `subprocess.Popen` does; Python is forked, where nothing comes before it."""
    if command[0] != sys.executable:
        return subprocess.Popen(command, **options)
    del options["text"]
    return forking.start(command[1:], **options)


class Rank:
    """A process that is one rank; its output can be awaited line by line."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.process = start_process(
            command,
            env={**os.environ, "PYTHONPATH": str(SOURCES), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._heard: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("")

    def line(self) -> str:
        """The next line that the rank says."""
        line = self._lines.get(timeout=SECONDS)
        self._heard.append(line)
        assert line, "the rank has ended; it said:\n" + "\n".join(self._heard)
        return line

    def tell(self, text: str = "") -> None:
        assert self.process.stdin
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def signal(self, which: signal.Signals) -> None:
        self.process.send_signal(which)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End the process and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Ranks:
    """Starts ranks that run one program, and ends them all when the test is over."""

    def __init__(self) -> None:
        self.all: list[Rank] = []

    def start(
        self, program: str, *arguments: dict[str, Any], prefixes: Sequence[Sequence[str]] = (), **environment: str
    ) -> list[Rank]:
        """Start one process for each set of arguments; a prefix is a command that starts it."""
        started = [
            Rank([*prefix, sys.executable, "-W", "error", "-c", PRELUDE + program, json.dumps(each)], environment)
            for each, prefix in itertools.zip_longest(arguments, prefixes, fillvalue=())
        ]
        self.all += started
        for each in started:
            assert each.line() == "imported"
        for each in started:
            each.tell()
        return started

    def job(self, program: str, size: int, **options: Any) -> list[Rank]:
        """Start a job of `size` ranks on this machine."""
        options = {"timeout": SECONDS, "pub_port": free_port(), **options}
        return self.start(program, *({**numbers(rank, size), **options} for rank in range(size)))

    def end(self) -> None:
        for rank in self.all:
            rank.end()


@contextlib.contextmanager
def contexts(size: int, machines: int = 1, order: Sequence[int] | None = None, **options: Any) -> Iterator[list[Any]]:
    """Contexts of all ranks in this process, made one after the other in the order given."""
    made: dict[int, core.DistributedContext] = {}
    options = {"timeout": SECONDS, "pub_port": free_port(), "pull_port": free_port(), **options}
    try:
        for rank in order or range(size):
            made[rank] = core.DistributedContext(**numbers(rank, size, machines), **options)
        yield [made[rank] for rank in range(size)]
    finally:
        for context in made.values():
            context.close()


def together(contexts: Sequence[Any], action: Callable[[Any], Any]) -> list[Any]:
    """What the action gives for each context, all at the same time; an exception is a result too."""

    def act(context: Any) -> Any:
        try:
            return action(context)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(contexts) or 1) as pool:
        return list(pool.map(act, contexts))
