"""How long training stands still for a checkpoint, against plain `torch.save` of the same state to the same place.

A model of 100 MB with Adam: about 300 MB of state. Blocking time is all the time from the end of `train_batch` to the
beginning of the next one, less that of a batch without a checkpoint. Ours and plain alternate in one run; the write
of a checkpoint has come to its end before the next measurement begins. The first checkpoint, for which the buffers are
made, is shown apart.

    python benchmarks/checkpoint_blocking.py [--megabytes 100] [--rounds 9]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch is first asked for a GPU

import torch
from torch import nn
from torch.utils.data import TensorDataset

from determined import pytorch

WIDTH = 1024
LAYER_BYTES = WIDTH * WIDTH * 4
PERIOD = 2
"""Batches from one checkpoint to the next: one gap between two batches with a checkpoint, then one without."""


class LargeTrial(pytorch.PyTorchTrial):
    megabytes = 100

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        layers = self.megabytes * 2**20 // LAYER_BYTES
        self.model = context.wrap_model(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))
        self.folder = pathlib.Path(os.environ["DET_HOME"], "checkpoints")
        self.gaps: dict[bool, list[float]] = {True: [], False: []}
        self.plain: list[float] = []
        self.left: float | None = None

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(torch.randn(64, WIDTH)), batch_size=1)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(torch.randn(1, WIDTH)), batch_size=1)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        entered = time.perf_counter()
        follows_checkpoint = batch_idx > 0 and batch_idx % PERIOD == 0
        if self.left is not None:
            self.gaps[follows_checkpoint].append(entered - self.left)
        if follows_checkpoint:
            self.await_checkpoint(batch_idx // PERIOD)
            self.save_plainly()
        (x,) = batch
        loss = self.model(x).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.left = time.perf_counter()
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.model(batch[0]).square().mean()}

    def await_checkpoint(self, number: int) -> None:
        """Wait until so many checkpoints are complete, and nothing waits to be written to the disk."""
        while sum((path / "manifest.json").exists() for path in self.folder.glob("*[!l]")) < number:
            time.sleep(0.01)
        os.sync()

    def save_plainly(self) -> None:
        path = self.folder / "plain.partial"
        began = time.perf_counter()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)
        self.plain.append(time.perf_counter() - began)
        path.unlink()
        os.sync()


def measure(megabytes: int, rounds: int) -> LargeTrial:
    retention = {"save_trial_latest": 1, "save_trial_best": 0, "save_experiment_best": 0}
    with pytorch.init(exp_conf={"checkpoint_storage": retention}) as context:
        trial = type("Trial", (LargeTrial,), {"megabytes": megabytes})(context)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(PERIOD * (rounds + 1) + 1),
            checkpoint_period=pytorch.Batch(PERIOD),
            checkpoint_policy="none",
        )
    return trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    os.environ["DET_PROGRESS"] = "0"
    with (
        tempfile.TemporaryDirectory() as home,
        pathlib.Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        os.environ["DET_HOME"] = home
        trial = measure(arguments.megabytes, arguments.rounds)
    usual = statistics.median(trial.gaps[False])
    first, *ours = (gap - usual for gap in trial.gaps[True])
    plain = trial.plain[1:]
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    print(f"checkpoint of a {arguments.megabytes} MB model with Adam, median of {len(ours)} interleaved rounds")
    print(f"  plain torch.save  {statistics.median(plain) * 1e3:7.1f} ms")
    print(f"  ours, blocking    {statistics.median(ours) * 1e3:7.1f} ms (the first one {first * 1e3:.1f} ms)")
    print(f"  ratio             {statistics.median(ratios):7.2f} ({', '.join(f'{r:.2f}' for r in sorted(ratios))})")


if __name__ == "__main__":
    sys.exit(main())
