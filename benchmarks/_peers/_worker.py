"""What every contender of benchmarks/peers.py shares: the work, and answering the command that measures it.

A contender runs `work` with its three jobs. Started with `serve` it does jobs on request, one JSON object a line on
standard input and output, and stays; started with `start` it trains once and says when the first batch was done.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

WIDTH = 16
BATCH_SIZE = 8
EPOCH = 1_000
"""Batches of training data."""

Train = Callable[[int, bool], Sequence[nn.Module]]
"""Trains so many batches, shuffled or in the data's order, and returns the models."""
Validate = Callable[[int], float]
"""Evaluates so many batches, and returns the mean of their losses."""
Job = Callable[[int, bool], Sequence[nn.Module] | float]


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Samples one by one, as a data set that somebody wrote gives them."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))
        self.y = self.x.flip(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def data(batches: int = EPOCH) -> Pairs:
    return Pairs(batches * BATCH_SIZE)


def training_loader(shuffle: bool) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=BATCH_SIZE, shuffle=shuffle)


def validation_loader(batches: int) -> DataLoader[Any]:
    return DataLoader(data(batches), batch_size=BATCH_SIZE)


def make_model(outputs: int = WIDTH) -> nn.Module:
    torch.manual_seed(outputs)
    return nn.Linear(WIDTH, outputs)


def make_optimizer(model: nn.Module) -> Adam:
    return Adam(model.parameters())


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def generator_loss(critic: nn.Module, fake: Tensor) -> Tensor:
    return (critic(fake) - 1).square().mean()


def critic_loss(critic: nn.Module, fake: Tensor, real: Tensor) -> Tensor:
    return critic(fake.detach()).square().mean() + (critic(real) - 1).square().mean()


def work(*, versions: Mapping[str, str], train: Train, validate: Validate, train_two: Train | None) -> None:
    """Do what the command asks for."""
    torch.set_num_threads(1)
    answers = _own_output()
    if sys.argv[1] == "start":
        _say(answers, _start(train, batches=int(sys.argv[2])))
        return
    jobs: dict[str, Job] = {"training": train, "validation": lambda batches, shuffle: validate(batches)}
    if train_two is not None:
        jobs["two optimizers"] = train_two
    _say(answers, _introduction(versions, list(jobs)))
    for line in sys.stdin:
        request = json.loads(line)
        answer = _checked if request["check"] else _timed
        _say(answers, answer(jobs[request["job"]], request["batches"]))


def _own_output() -> TextIO:
    """Return standard output, and leave nothing of it to what the libraries print."""
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return answers


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def _introduction(versions: Mapping[str, str], jobs: Sequence[str]) -> dict[str, Any]:
    torch_path = os.path.realpath(torch.__file__)
    return {"jobs": jobs, "versions": versions, "torch": torch.__version__, "torch_path": torch_path}


def _timed(job: Job, batches: int) -> dict[str, Any]:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    job(batches, True)
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def _checked(job: Job, batches: int) -> dict[str, Any]:
    """Do a job in the data's order, and return what came out of it and how many steps optimizers took."""
    steps = itertools.count()

    def count(*_: Any) -> None:
        next(steps)

    handle = register_optimizer_step_post_hook(count)
    result = job(batches, False)
    handle.remove()
    values = [result] if isinstance(result, float) else list(_weights(result))
    return {"values": values, "steps": next(steps)}


def _weights(models: Sequence[nn.Module]) -> Iterator[float]:
    for model in models:
        for parameter in model.parameters():
            yield from parameter.detach().flatten().tolist()


def _start(train: Train, batches: int) -> dict[str, Any]:
    first: list[tuple[float, float]] = []

    def note(*_: Any) -> None:
        if not first:
            first.append((time.monotonic(), time.process_time()))

    register_optimizer_step_post_hook(note)
    train(batches, True)
    ((moment, cpu),) = first
    return {"moment": moment, "cpu": cpu, "peak_kib": _peak_kib()}


def _peak_kib() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])
