"""How fast several processes train one model, against a plain DDP loop on the same work.

Two ranks over gloo on the CPU, one thread each; the model has about a million weights, batches of 64. Both loops run in
the same processes and the same process group, turn by turn; ours with the record, TensorBoard and reports of every 100
batches. Timed are the batches from the first quarter of a turn to its end, so that starts do not count.

    python benchmarks/ddp_throughput.py [--ranks 2] [--batches 400] [--rounds 7]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch is first asked for a GPU

import torch
from _timing import Watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from determined import pytorch

WIDTH = 512
BATCH_SIZE = 64


def model() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def data() -> TensorDataset:
    x = torch.randn(8192, WIDTH, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.flip(1))


def train_plainly(batches: int) -> float:
    replica = DistributedDataParallel(model())
    optimizer = torch.optim.Adam(replica.parameters())
    samples = data()
    loader = DataLoader(samples, batch_size=BATCH_SIZE, sampler=DistributedSampler(samples, shuffle=True))
    watch, done = Watch(batches), 0
    while done < batches:
        for x, y in loader:
            loss = nn.functional.mse_loss(replica(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.tick(done)
            done += 1
            if done == batches:
                break
    return watch.seconds


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, watch: Watch) -> None:
        self.context = context
        self.watch = watch
        self.model = context.wrap_model(model())
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(), batch_size=BATCH_SIZE, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(*data()[:BATCH_SIZE]), batch_size=BATCH_SIZE)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.watch.tick(batch_idx)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        return {"validation_loss": nn.functional.mse_loss(self.model(x), y)}


def train_with_us(batches: int) -> float:
    watch = Watch(batches)
    with (
        pathlib.Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        pytorch.init() as context,
    ):
        trainer = pytorch.Trainer(Trial(context, watch), context)
        trainer.fit(max_length=pytorch.Batch(batches), checkpoint_policy="none")
    return watch.seconds


def compare(batches: int, rounds: int) -> None:
    """Alternate both loops in this rank; the chief prints."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    train_plainly(batches // 4)
    pairs = [(train_plainly(batches), train_with_us(batches)) for _ in range(rounds)]
    if torch.distributed.get_rank() == 0:
        plain, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = sorted(a / b for a, b in pairs)
        size = torch.distributed.get_world_size()
        print(f"training by {size} ranks (gloo), median of {rounds} interleaved rounds of {batches} batches")
        print(f"  plain DDP loop  {plain * 1e3:7.3f} ms a batch")
        print(f"  ours            {ours * 1e3:7.3f} ms a batch")
        spread = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"  throughput of ours by that of the plain loop  {statistics.median(ratios):.3f} ({spread})")
    torch.distributed.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        compare(arguments.batches, arguments.rounds)
        return 0
    with tempfile.TemporaryDirectory() as home:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [*launch, str(arguments.ranks), *sys.argv]
        environment = {**os.environ, "DET_HOME": home, "DET_PROGRESS": "0", "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
