"""What the training loop and the validation loop cost above plain PyTorch, per batch.

A tiny model (linear 16 -> 16, batches of 8) on one CPU thread, so that nothing hides the loop; and two such models
with an optimizer each, trained against each other. CPU time of all threads counts, with the record, TensorBoard and
the progress bar on. Plain and ours alternate in one process; each figure is a slope between a short and a long run, so
that start-up, the final validation and the checkpoint cancel. The loops are those of benchmarks/peers.py.

    python benchmarks/loop_overhead.py [--batches 5000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both on the CPU; read when torch is first asked for a GPU
sys.path.insert(0, str(pathlib.Path(__file__).parent / "_peers"))  # where the contenders find what they share

import ours
import plain
import torch

SHORT = 500
WARM_UP = 200

Work = Callable[[int], object]

JOBS: dict[str, tuple[Work, Work]] = {
    "training": (lambda n: plain.train(n, shuffle=True), lambda n: ours.train(n, shuffle=True)),
    "validation": (plain.validate, ours.validate),
    "two optimizers": (lambda n: plain.train_two(n, shuffle=True), lambda n: ours.train_two(n, shuffle=True)),
}


def cpu_seconds(work: Work, batches: int) -> float:
    began = time.process_time()
    work(batches)
    return time.process_time() - began


def calls(work: Work, batches: int) -> int:
    """Count the Python functions called, on all threads."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        work(batches)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count


def slope(measure: Callable[[int], float], short: int, long: int) -> float:
    return (measure(long) - measure(short)) / (long - short)


def compare(name: str, plain_work: Work, our_work: Work, long: int, rounds: int) -> None:
    short = min(SHORT, long // 10)
    plain_times, our_times = [], []
    for work in (plain_work, our_work):
        work(WARM_UP)
    for _ in range(rounds):
        plain_times.append(slope(lambda n: cpu_seconds(plain_work, n), short, long) * 1e6)
        our_times.append(slope(lambda n: cpu_seconds(our_work, n), short, long) * 1e6)
    extra = [b - a for a, b in zip(plain_times, our_times, strict=True)]
    plain_calls = slope(lambda n: calls(plain_work, n), short, long // 2)
    our_calls = slope(lambda n: calls(our_work, n), short, long // 2)
    lines = [
        f"{name}: CPU time per batch, median of {rounds} interleaved rounds of {long} batches",
        f"  plain loop   {statistics.median(plain_times):7.1f} us",
        f"  ours         {statistics.median(our_times):7.1f} us",
        f"  above plain  {statistics.median(extra):+7.1f} us ({', '.join(f'{e:+.1f}' for e in sorted(extra))})",
        f"  Python calls {plain_calls:.1f} plain, {our_calls:.1f} ours: {our_calls / plain_calls:.3f} times",
    ]
    print("\n".join(lines), file=sys.stderr)  # standard output belongs to the progress bar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["DET_PROGRESS"] = "1"  # the bar, though its output goes nowhere
    with (
        tempfile.TemporaryDirectory() as home,
        pathlib.Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        os.environ["DET_HOME"] = home
        for name, works in JOBS.items():
            compare(name, *works, long=arguments.batches, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
