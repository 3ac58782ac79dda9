"""core.DistributedContext made from a process group or from Horovod."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest
from core_ranks import SOURCES, together

from determined import core, errors

PROGRAM = """
import os, sys
import torch.distributed as dist
from determined import core

dist.init_process_group("gloo")

def show(label):
    context = core.DistributedContext.from_torch_distributed()
    everyone = context.allgather(context.rank)
    place = (context.local_rank, context.local_size, context.cross_rank, context.cross_size)
    sys.stdout.write(f"{label} {context.rank} {place} {everyone} {context.allgather_local(context.rank)}\\n")
    sys.stdout.flush()
    context.close()

show("launched")
os.environ["GROUP_RANK"], os.environ["GROUP_WORLD_SIZE"] = os.environ["RANK"], "2"
os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
show("apart")
if dist.get_rank() == 0:
    del os.environ["LOCAL_RANK"]
show("hosts")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two processes under torchrun say: as launched, as if on two machines, and without what torchrun tells."""
    file = tmp_path_factory.mktemp("torchrun") / "program.py"
    file.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "TMPDIR": str(file.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.process
@pytest.mark.parametrize(
    ("label", "places", "nearby"),
    [
        ("launched", ["(0, 2, 0, 1)", "(1, 2, 0, 1)"], ["[0, 1]", "[0, 1]"]),
        ("apart", ["(0, 1, 0, 2)", "(0, 1, 1, 2)"], ["[0]", "[1]"]),
        ("hosts", ["(0, 2, 0, 1)", "(1, 2, 0, 1)"], ["[0, 1]", "[0, 1]"]),
    ],
)
def test_process_group_is_all_that_is_needed(
    label: str, places: list[str], nearby: list[str], torchrun: list[str]
) -> None:
    said = [line for line in torchrun if line.startswith(label)]
    assert said == [f"{label} {rank} {places[rank]} [0, 1] {nearby[rank]}" for rank in range(2)]


class Horovod:
    """Answers as an initialized `horovod.torch` does, for ranks that are threads on machines of one rank each."""

    def __init__(self, rank: int, size: int, machines: int, board: Board) -> None:
        self._numbers = (rank, size, machines)
        self._board = board

    def rank(self) -> int:
        return self._numbers[0]

    def size(self) -> int:
        return self._numbers[1]

    def local_rank(self) -> int:
        return 0 if self._numbers[2] > 1 else self._numbers[0]

    def local_size(self) -> int:
        return 1 if self._numbers[2] > 1 else self._numbers[1]

    def cross_rank(self) -> int:
        return self._numbers[0] if self._numbers[2] > 1 else 0

    def cross_size(self) -> int:
        return self._numbers[2]

    def broadcast_object(self, item: Any, root_rank: int = 0) -> Any:
        return self._board.share(item, self.rank() == root_rank)


class Board:
    """Shows what one thread writes on it to the others."""

    def __init__(self) -> None:
        self._is_written = threading.Event()
        self._item: Any = None

    def share(self, item: Any, is_writer: bool) -> Any:
        if is_writer:
            self._item = item
            self._is_written.set()
        self._is_written.wait(30)
        return self._item


@pytest.mark.parametrize("machines", [1, 2])
def test_horovod_shares_where_to_meet(machines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()

    def act(rank: int) -> Any:
        context = core.DistributedContext.from_horovod(Horovod(rank, 2, machines, board), chief_ip="127.0.0.1")
        gathered = context.allgather(rank)
        context.broadcast(None)
        context.close()
        return gathered

    assert together([0, 1], act) == [[0, 1]] * 2


def test_chief_that_cannot_listen_is_named_on_all_ranks() -> None:
    board = Board()
    results = together(
        [0, 1], lambda rank: core.DistributedContext.from_horovod(Horovod(rank, 2, 2, board), chief_ip="192.0.2.7")
    )
    for result in results:
        assert isinstance(result, errors.InternalException)
        assert "Rank 0 cannot listen" in str(result)
        assert "pass that as chief_ip" in str(result)


def test_importing_core_needs_no_torch(tmp_path: pathlib.Path) -> None:
    program = "import sys; from determined.core import DistributedContext; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path).returncode == 0
