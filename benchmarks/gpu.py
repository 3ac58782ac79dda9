"""How fast a GPU trains with us, against a plain loop and other libraries that are installed, on the same work.

Three models: a tiny MLP, for which the GPU waits for Python; a small GPT; a ResNet-50. All alternate in one process, on
the same data from the same kind of loader, with fused AdamW. The plain loop never waits for the GPU but to read its
losses every 100 batches; ours does the same, and records, and writes TensorBoard files; other libraries log nothing.
Timed are the batches from the first quarter of a turn to its end, with the GPU at rest at both.

A shared machine changes its speed from turn to turn. With `--closely` ours and two plain loops alternate within a turn,
many times, each with its own model: neighbouring blocks of batches meet the same machine. The second plain loop shows
how well that tells loops apart.

    python benchmarks/gpu.py [--rounds 5] [--only MLP] [--without-peers] [--closely] [--trace FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import pathlib
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _gpu_peers import PEERS
from _models import DEVICE, WORKS, Work
from _timing import Alternation, TimedBatches
from torch import nn
from torch.utils.data import DataLoader

from determined import pytorch

REPORT_EVERY = 100
STEP = "step"


Collate = Callable[[Any], Any]


def plain_loop(work: Work, collate: Collate) -> Iterator[None]:
    """Train with a loop as people write it; it stops after each batch, to be asked for the next."""
    torch.manual_seed(1)
    model = work.make_model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = DataLoader(work.make_data(), work.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    done, losses = 0, []
    while True:
        for inputs, targets in loader:
            inputs, targets = inputs.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)
            with torch.profiler.record_function(STEP):
                loss = work.loss_of(model, inputs, targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            del loss  # and with it what backward went along, outside of the step in both loops
            done += 1
            if done % REPORT_EVERY == 0:
                torch.stack(losses).cpu()
                losses.clear()
            yield


def train_plainly(work: Work, profiler: torch.profiler.profile | None = None) -> float:
    timed = TimedBatches(work.batches, profiler)
    for _ in itertools.islice(plain_loop(work, timed.collate), work.batches):
        pass
    return timed.watch.seconds


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, work: Work, collate: Collate) -> None:
        self.context = context
        self.work = work
        self.collate = collate
        context.get_experiment_id()  # waits for the record, which is opened once, not with each batch
        torch.manual_seed(1)
        self.model: nn.Module = context.wrap_model(work.make_model())
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), fused=True))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        options = {"shuffle": True, "drop_last": True, "collate_fn": self.collate}
        return pytorch.DataLoader(self.work.make_data(), self.work.batch_size, **options)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.work.make_data(), 1, sampler=[0], collate_fn=lambda batch: batch)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        with torch.profiler.record_function(STEP):
            loss = self.work.loss_of(self.model, *batch)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.work.loss_of(self.model, *batch)}


def fit(work: Work, collate: Collate, **optimizations: Any) -> None:
    with (
        pathlib.Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        pytorch.init(optimizations=optimizations) as context,
    ):
        trainer = pytorch.Trainer(Trial(context, work, collate), context)
        trainer.fit(
            max_length=pytorch.Batch(work.batches),
            reporting_period=pytorch.Batch(REPORT_EVERY),
            checkpoint_policy="none",
        )


def train_with_us(work: Work, profiler: torch.profiler.profile | None = None, **optimizations: Any) -> float:
    timed = TimedBatches(work.batches, profiler)
    fit(work, timed.collate, **optimizations)
    return timed.watch.seconds


Contenders = dict[str, Callable[[Work], float]]

OURS: Contenders = {
    "plain loop": train_plainly,
    "Resolute": train_with_us,
    "Resolute, CUDA graphs": functools.partial(train_with_us, cuda_graphs=True),
}


def compare(work: Work, contenders: Contenders, rounds: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders.items())
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)  # so that nobody always comes after the same one
        for name, train in order:
            seconds = train(work)
            gc.collect()  # what a turn leaves, such as the memory of CUDA graphs, is not for the next one to clear
            if turn:  # the first sets up what the others use
                times[name].append(seconds)
    plain = times["plain loop"]
    for name, its in times.items():
        ratios = sorted(own / reference for own, reference in zip(its, plain, strict=True))
        spread = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        time, ratio = statistics.median(its) * 1e6, statistics.median(ratios)
        of_fastest = min(its) / min(plain)
        print(
            f"  {name:24} {time:9.0f} us a batch, ratio {ratio:.3f} ({spread}); fastest turns {of_fastest:.3f}",
            flush=True,
        )


def compare_closely(work: Work, rounds: int) -> None:
    """Let ours and two plain loops train a tenth of a turn by turns, each with its own model."""
    blocks: list[list[float]] = []
    for turn in range(rounds + 1):
        plain_loops = [plain_loop(work, lambda batch: batch) for _ in range(2)]
        alternation = Alternation(work.batches // 10, plain_loops)
        fit(work, alternation.collate)
        gc.collect()
        if turn:
            blocks += alternation.blocks[1:]
    ours, plain, again = zip(*blocks, strict=True)
    print(f"  {statistics.median(plain) * 1e6:.0f} us a batch of the plain loop; {len(blocks)} blocks of each loop")
    print_ratios("Resolute", [own / math.sqrt(a * b) for own, a, b in zip(ours, plain, again, strict=True)])
    print_ratios("a second plain loop", [b / a for a, b in zip(plain, again, strict=True)])


def print_ratios(name: str, ratios: list[float]) -> None:
    """Print how the ratios lie. Their mean is geometric: noise makes the arithmetic one of equal loops exceed 1."""
    low, median, high = statistics.quantiles(ratios, n=4)
    mean = statistics.geometric_mean(ratios)
    error = mean * statistics.stdev(map(math.log, ratios)) / len(ratios) ** 0.5
    half = f"half of them {low:.3f} to {high:.3f}"
    print(f"  {name:20} ratio {median:.3f} ({half}), mean {mean:.3f} +- {error:.3f}", flush=True)


def trace(work: Work, folder: pathlib.Path) -> None:
    """Profile the last batches of a turn of each loop, and show how long the host is away from the program's step."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, train in (("plain", train_plainly), ("resolute", train_with_us)):
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        profiler = torch.profiler.profile(activities=activities)
        train(work, profiler)
        path = folder / f"{work.name.replace(' ', '-')}-{name}.json"
        profiler.export_chrome_trace(str(path))
        steps = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in json.loads(path.read_text())["traceEvents"]
            if event.get("name") == STEP and event.get("cat") == "user_annotation"
        )
        gaps = [after[0] - before[1] for before, after in itertools.pairwise(steps)]
        print(
            f"  {name:10} {statistics.median(gaps):6.0f} us between the steps of two batches ({path.name})", flush=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--trace", type=pathlib.Path, help="write traces of torch's profiler to this folder instead")
    parser.add_argument("--without-peers", action="store_true", help="only the plain loop and ours")
    parser.add_argument("--closely", action="store_true", help="ours and two plain loops alternate within a turn")
    parser.add_argument("--batches", type=int, help="of a turn, whatever the model")
    parser.add_argument("--cpu", action="store_true", help="where there is no GPU, to try this script")
    arguments = parser.parse_args()
    if DEVICE.type != "cuda" and not arguments.cpu:
        print("benchmarks/gpu.py needs a CUDA GPU; there is none here.")
        return 0
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, median of {arguments.rounds} interleaved rounds")
    contenders = OURS if arguments.without_peers else OURS | PEERS
    torch.set_num_threads(1)  # others would spin while they wait for the next batch, and disturb both loops
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"DET_HOME": home, "DET_PROGRESS": "0"}
        for work in WORKS:
            if arguments.only.lower() not in work.name.lower():
                continue
            print(work.name)
            chosen = dataclasses.replace(work, batches=arguments.batches or work.batches)
            if arguments.trace:
                trace(chosen, arguments.trace)
            elif arguments.closely:
                compare_closely(chosen, arguments.rounds)
            else:
                compare(chosen, contenders, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
