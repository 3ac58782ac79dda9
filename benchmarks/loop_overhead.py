"""What the training loop and the validation loop cost above plain PyTorch, per batch.

A tiny model (linear 16 -> 16, batches of 8) on one CPU thread, so that nothing hides the loop. CPU time of all
threads counts, with the record, TensorBoard and the progress bar on. Plain and ours alternate in one process; each
figure is a slope between a short and a long run, so that start-up, the final validation and the checkpoint cancel.

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

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from determined import pytorch

SHORT = 500
BATCH_SIZE = 8


def data() -> TensorDataset:
    x = torch.randn(8_000, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.flip(1))


def plain_training(batches: int) -> None:
    model = nn.Linear(16, 16)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(data(), batch_size=BATCH_SIZE, shuffle=True)
    done = 0
    while True:
        for x, y in loader:
            if done == batches:
                return
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1


def plain_evaluation(batches: int) -> None:
    model = nn.Linear(16, 16).eval()
    loader = DataLoader(TensorDataset(*data()[: batches * BATCH_SIZE]), batch_size=BATCH_SIZE)
    losses = []
    with torch.no_grad():
        for x, y in loader:
            losses.append(nn.functional.mse_loss(model(x), y))
    torch.stack(losses).mean().item()


class TinyTrial(pytorch.PyTorchTrial):
    validation_batches = 1

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(16, 16))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(), batch_size=BATCH_SIZE, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        samples = self.validation_batches * BATCH_SIZE
        return pytorch.DataLoader(TensorDataset(*data()[:samples]), batch_size=BATCH_SIZE)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        return {"validation_loss": nn.functional.mse_loss(self.model(x), y)}


def our_training(batches: int) -> None:
    with pytorch.init() as context:
        pytorch.Trainer(TinyTrial(context), context).fit(max_length=pytorch.Batch(batches))


def our_evaluation(batches: int) -> None:
    trial_class = type("Validating", (TinyTrial,), {"validation_batches": batches})
    with pytorch.init() as context:
        pytorch.Trainer(trial_class(context), context).fit(max_length=pytorch.Batch(1))


def cpu_seconds(work: Callable[[int], None], batches: int) -> float:
    began = time.process_time()
    work(batches)
    return time.process_time() - began


def calls(work: Callable[[int], None], batches: int) -> int:
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


def compare(name: str, plain: Callable[[int], None], ours: Callable[[int], None], long: int, rounds: int) -> None:
    short = min(SHORT, long // 10)
    plain_times, our_times = [], []
    for _ in range(rounds):
        plain_times.append(slope(lambda n: cpu_seconds(plain, n), short, long) * 1e6)
        our_times.append(slope(lambda n: cpu_seconds(ours, n), short, long) * 1e6)
    extra = [b - a for a, b in zip(plain_times, our_times, strict=True)]
    plain_calls = slope(lambda n: calls(plain, n), short, long // 2)
    our_calls = slope(lambda n: calls(ours, n), short, long // 2)
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
        our_training(200)  # imports, and the database
        plain_training(200)
        compare("training", plain_training, our_training, arguments.batches, arguments.rounds)
        compare("validation", plain_evaluation, our_evaluation, min(arguments.batches, 1000), arguments.rounds)


if __name__ == "__main__":
    main()
