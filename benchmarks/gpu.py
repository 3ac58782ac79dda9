"""How fast a GPU trains with us, against a plain loop on the same work.

Three models: a tiny MLP, for which the GPU waits for Python; a small GPT; a ResNet-50. Both loops alternate in one
process, on the same data from the same kind of loader, with fused AdamW. The plain loop never waits for the GPU but to
read its losses every 100 batches; ours does the same, and records, and writes TensorBoard files. Timed are the
batches from the first quarter of a turn to its end, with the GPU at rest at both.

    python benchmarks/gpu.py [--rounds 5] [--only MLP]
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

import torch
from _models import WORKS, Work
from torch import nn
from torch.utils.data import DataLoader

from determined import pytorch

REPORT_EVERY = 100


class Watch:
    """Seconds a batch, from the first quarter of a turn to its end."""

    def __init__(self, batches: int) -> None:
        self._first, self._last = batches // 4, batches - 1
        self._began = 0.0
        self.seconds = 0.0

    def tick(self, batch_idx: int) -> None:
        if batch_idx in (self._first, self._last):
            torch.cuda.synchronize()
        if batch_idx == self._first:
            self._began = time.perf_counter()
        elif batch_idx == self._last:
            self.seconds = (time.perf_counter() - self._began) / (self._last - self._first)


def autocast(work: Work) -> Any:
    return torch.autocast("cuda", work.dtype) if work.dtype is not None else contextlib.nullcontext()


def train_plainly(work: Work) -> float:
    device = torch.device("cuda")
    torch.manual_seed(1)
    model = work.make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = DataLoader(work.make_data(), batch_size=work.batch_size, shuffle=True, drop_last=True)
    watch, done, losses = Watch(work.batches), 0, []
    while done < work.batches:
        for inputs, targets in loader:
            with autocast(work):
                loss = work.loss(model(inputs.to(device, non_blocking=True)), targets.to(device, non_blocking=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            watch.tick(done)
            done += 1
            if done % REPORT_EVERY == 0:
                torch.stack(losses).cpu()
                losses.clear()
            if done == work.batches:
                break
    return watch.seconds


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, work: Work, watch: Watch) -> None:
        self.context = context
        self.work = work
        self.watch = watch
        torch.manual_seed(1)
        self.model: nn.Module = context.wrap_model(work.make_model())
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), fused=True))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.work.make_data(), self.work.batch_size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.utils.data.Subset(self.work.make_data(), [0]))

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        with autocast(self.work):
            return self.work.loss(self.model(inputs), targets)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.watch.tick(batch_idx)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch)}


def train_with_us(work: Work) -> float:
    watch = Watch(work.batches)
    with (
        pathlib.Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        pytorch.init() as context,
    ):
        trainer = pytorch.Trainer(Trial(context, work, watch), context)
        trainer.fit(
            max_length=pytorch.Batch(work.batches),
            reporting_period=pytorch.Batch(REPORT_EVERY),
            checkpoint_policy="none",
        )
    return watch.seconds


def compare(work: Work, rounds: int) -> None:
    train_plainly(work)
    train_with_us(work)
    pairs = [(train_plainly(work), train_with_us(work)) for _ in range(rounds)]
    plain, ours = (statistics.median(side) * 1e6 for side in zip(*pairs, strict=True))
    ratios = sorted(b / a for a, b in pairs)
    spread = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(
        f"{work.name:12} {plain:9.0f} {ours:9.0f} us a batch   {statistics.median(ratios):.3f} ({spread})", flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="part of a model's name")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA GPU; there is none here.")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {arguments.rounds} interleaved rounds")
    print(f"{'':12} {'plain':>9} {'ours':>9}                ratio")
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"DET_HOME": home, "DET_PROGRESS": "0"}
        for work in WORKS:
            if arguments.only.lower() in work.name.lower():
                compare(work, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
