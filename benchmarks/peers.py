"""What training libraries cost above plain PyTorch: Resolute, Lightning, Accelerate, Ignite, HF Trainer.

The same work for all: a linear model 16 -> 16, batches of 8, Adam, one thread, on the CPU, so that nothing hides the
loop. Resolute keeps its record, TensorBoard files and progress bar; the others run with such things switched off. Each
contender is a process of its own, and they take turns, job by job; after some rounds all begin anew, since two
processes of the same program differ by a few percent. The cost of a batch is the slope between a short and a long job,
so that starts and ends cancel: CPU time of all threads, and time on the clock. First batch and peak memory are those
of fresh processes, which take turns too. Before anything is timed, a short training in a fixed order must end with
the same weights for all, after the same number of optimizer steps.

Each peer is installed in an environment of its own under .bench/, with this environment's torch. Figures and a plot
are left there.

    python benchmarks/peers.py [--sittings 5] [--rounds 2] [--batches 3000] [--starts 7] [--only Lightning,Ignite]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from _contenders import OURS, PEERS, PLAIN, Entrant, Worker, entered, working
from _figures import Column, plot, table

JOBS = ("training", "validation", "two optimizers")
START_BATCHES = 500
CHECKED_BATCHES = 50

T = TypeVar("T")


def check_same_work(workers: Sequence[Worker]) -> None:
    """Refuse to measure contenders that do not end with the weights and losses of the plain loop."""
    plain, *others = workers
    for job in JOBS:
        expected = plain.ask(job, CHECKED_BATCHES, check=True)
        for worker in others:
            if worker.can(job):
                check_same_result(worker.name, job, worker.ask(job, CHECKED_BATCHES, check=True), expected)
    print(f"all did the same {CHECKED_BATCHES} batches of each job: equal weights, losses and numbers of steps")


def check_same_result(name: str, job: str, found: dict[str, object], expected: dict[str, object]) -> None:
    if found["steps"] != expected["steps"]:
        raise SystemExit(f"{name} took {found['steps']} optimizer steps for {job}, plain {expected['steps']}.")
    pairs = zip(found["values"], expected["values"], strict=True)  # type: ignore[call-overload]  # lists of numbers
    if (distance := max(abs(a - b) for a, b in pairs)) > 1e-6:
        raise SystemExit(f"{name} did other work for {job}: its results are up to {distance:g} from those of plain.")


def turns(contenders: Sequence[T], rounds: int) -> Iterator[T]:
    """Yield all contenders in each round; another one begins each time."""
    for number in range(rounds):
        first = number % len(contenders)
        yield from contenders[first:]
        yield from contenders[:first]


def slopes(workers: Sequence[Worker], job: str, long: int, rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield who took how many microseconds for a batch of a job, of CPU time and on the clock."""
    short = max(long // 10, 1)
    able = [worker for worker in workers if worker.can(job)]
    for worker in able:
        worker.ask(job, short)  # whatever happens only once
    for worker in turns(able, rounds):
        few, many = worker.ask(job, short), worker.ask(job, long)
        yield worker.name, {clock: (many[clock] - few[clock]) / (long - short) * 1e6 for clock in ("cpu", "wall")}


def costs(entrants: Sequence[Entrant], arguments: argparse.Namespace) -> tuple[list[Column], dict[str, str]]:
    """Return what a batch of each job costs, and the versions of all that took part."""
    names = [entrant.name for entrant in entrants]
    units = {"cpu": "CPU us a batch", "wall": "us a batch on the clock"}
    columns = {(job, clock): Column(job, units[clock], {name: [] for name in names}) for job in JOBS for clock in units}
    for sitting in range(arguments.sittings):
        with working(entrants) as workers:
            if sitting == 0:
                check_same_work(workers)
            for job in JOBS:
                for name, slope in slopes(workers, job, arguments.batches, arguments.rounds):
                    for clock, value in slope.items():
                        columns[job, clock].values[name].append(value)
            versions = {k: v for worker in workers for k, v in worker.introduction["versions"].items()}
    return sorted(columns.values(), key=lambda column: column.unit), versions


def starts(entrants: Sequence[Entrant], rounds: int) -> list[Column]:
    """Return what a fresh process takes until its first batch is trained, and its peak memory."""
    columns = [
        Column("first batch", "s from the start of the process", {}),
        Column("first batch", "s of CPU time", {}),
        Column("peak memory", "MiB", {}),
    ]
    for entrant in entrants:
        entrant.start(START_BATCHES)  # so that its files are in the page cache
    for entrant in turns(entrants, rounds):
        answer = entrant.start(START_BATCHES)
        for column, key in zip(columns, ("wall", "cpu", "peak"), strict=True):
            column.values.setdefault(entrant.name, []).append(answer[key])
    return columns


def save(columns: Sequence[Column], folder: pathlib.Path, facts: dict[str, object], versions: dict[str, str]) -> None:
    found = [{"title": column.title, "unit": column.unit, "values": column.values} for column in columns]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.json").write_text(json.dumps({**facts, "versions": versions, "columns": found}, indent=1))
    shown = [column for column in columns if column.unit in ("CPU us a batch", "MiB") or "process" in column.unit]
    caption = ", ".join(f"{name} {version}" for name, version in versions.items())
    plot(shown, folder / "peers.png", caption)
    print(f"figures: {folder / 'peers.json'}, plot: {folder / 'peers.png'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sittings", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="of a sitting")
    parser.add_argument("--batches", type=int, default=3000)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--only", default="", help="names of peers, with commas; 'none' for plain and Resolute alone")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path(".bench"))
    arguments = parser.parse_args()
    chosen = [peer for peer in PEERS if not arguments.only or peer.name in arguments.only.split(",")]
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    facts: dict[str, object] = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "command": sys.argv}
    with entered([PLAIN, OURS, *chosen], arguments.folder) as entrants:
        columns, versions = costs(entrants, arguments)
        columns += starts(entrants, arguments.starts)
    print(f"{facts['machine']}; " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    for column in columns:
        print(table(column, PLAIN.name))
    save(columns, arguments.folder, facts, versions)


if __name__ == "__main__":
    main()
