"""How long it takes to have a checkpoint back, verified and restored, against plain `torch.load` of the same file.

A model of 100 MB with Adam: about 300 MB of state. Ours is everything that going on from the checkpoint costs: checking
the manifest and all checksums, reading, and putting the state into model and optimizer; plain only reads. Each
measurement has a process of its own, as a resumed training has; ours and plain alternate; the file is in the page
cache.

    python benchmarks/checkpoint_loading.py [--megabytes 100] [--rounds 9]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
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


class Watch(pytorch.PyTorchCallback):
    """Notes how long `fit` takes from asking for callbacks, with which it begins, until training can begin."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.ready = self.began

    def on_training_start(self) -> None:
        self.ready = time.perf_counter()


class LargeTrial(pytorch.PyTorchTrial):
    megabytes = 100

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        layers = self.megabytes * 2**20 // LAYER_BYTES
        self.model = context.wrap_model(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        self.watch = Watch()
        return {"watch": self.watch}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(torch.randn(8, WIDTH)), batch_size=1)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        (x,) = batch
        loss = self.model(x).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.model(batch[0]).square().mean()}


def fit(megabytes: int, checkpoint: str | None = None) -> float:
    """Train one batch, or none from a checkpoint of one, and return the seconds until training could begin."""
    with pathlib.Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere), pytorch.init() as context:
        trial = type("Trial", (LargeTrial,), {"megabytes": megabytes})(context)
        trainer = pytorch.Trainer(trial, context)
        context.get_trial_id()  # the record is open, and its thread at rest
        trainer.fit(max_length=pytorch.Batch(1), checkpoint_policy="none", latest_checkpoint=checkpoint)
    return float(trial.watch.ready - trial.watch.began)


def load_plainly(path: pathlib.Path) -> float:
    began = time.perf_counter()
    state = torch.load(path, weights_only=True, map_location="cpu")
    took = time.perf_counter() - began
    assert state
    return took


def compare(megabytes: int, rounds: int) -> tuple[list[float], list[float]]:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["determined.pytorch", "__main__"])
    with processes.Pool(1, maxtasksperchild=1) as pool:
        pool.apply(fit, [megabytes])
        (folder,) = pathlib.Path(os.environ["DET_HOME"], "checkpoints").iterdir()
        measure_plain = functools.partial(pool.apply, load_plainly, [folder / "state_dict.pth"])
        measure_ours = functools.partial(pool.apply, fit, [megabytes, str(folder)])
        measure_plain()  # the file is in the page cache now
        pairs = [(measure_plain(), measure_ours()) for _ in range(rounds)]
    return [plain for plain, _ in pairs], [ours for _, ours in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    os.environ["DET_PROGRESS"] = "0"
    with tempfile.TemporaryDirectory() as home:
        os.environ["DET_HOME"] = home
        plain, ours = compare(arguments.megabytes, arguments.rounds)
    ratios = [b / a for a, b in zip(plain, ours, strict=True)]
    print(f"checkpoint of a {arguments.megabytes} MB model with Adam, median of {len(ours)} interleaved rounds")
    print(f"  plain torch.load                 {statistics.median(plain) * 1e3:7.1f} ms")
    print(f"  ours: verify, read and restore   {statistics.median(ours) * 1e3:7.1f} ms")
    print(f"  ratio {statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in sorted(ratios))})")


if __name__ == "__main__":
    sys.exit(main())
