"""Kill a random rank of a training at a random moment, start all again, until it is done; compare it bit for bit.

python tests/torture/rank_kills.py [--kills 40] [--ranks 2] [--seed 1]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

import ranks
from determined.pytorch import Batch
from trials import LineTrial, assert_same, fit, records

BATCHES = 60


class RandomTrial(LineTrial):
    """Draws random numbers, aggregates, and takes a little time."""

    samples = 44

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        time.sleep(0.01)
        return super().train_batch(batch, epoch_idx, batch_idx)


def train(home: str) -> dict[str, Any]:
    os.environ["DET_HOME"] = home
    trial = fit(
        RandomTrial,
        init={
            "exp_conf": {"name": "killed", "reproducibility": {"experiment_seed": 5}},
            "aggregation_frequency": 2,
        },
        max_length=Batch(BATCHES),
        reporting_period=Batch(7),
        checkpoint_period=Batch(5),
        validation_period=Batch(15),
        latest_checkpoint="latest",
    )
    return {"model": dict(trial.model.state_dict()), "optimizer": trial.optimizer.state_dict()}


def survive(size: int, home: str, chance: random.Random, most_kills: int) -> tuple[dict[str, Any], int]:
    """Train with kills until it is done; returns what it ended with, and how many kills there were."""
    kills = 0
    while True:
        with ranks.started(train, size, home) as started:
            if kills < most_kills:
                victim = started.processes[chance.randrange(size)]
                victim.join(chance.uniform(0.3, 2.0))
                if victim.exitcode is None:
                    os.kill(victim.pid, signal.SIGKILL)
                    kills += 1
            ended = started.wait(60)
        if all(one.status == 0 for one in ended):
            return ended[0].result, kills
        if late := [one.rank for one in ended if one.status is None]:
            raise AssertionError(f"ranks {late} did not end: {[one.output for one in ended]}")


def differences(size: int, kills: int, seed: int) -> tuple[int, int]:
    """Return (kills, runs whose end differs from that of a run without kills)."""
    chance, done, different = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        (expected, *_) = ranks.run(train, size, f"{folder}/whole")
        number = 0
        while done < kills:
            number += 1
            home = f"{folder}/{number}"
            found, count = survive(size, home, chance, min(4, kills - done))
            done += count
            os.environ["DET_HOME"] = home
            try:
                assert_same(found, expected)
                assert max(one.steps_completed for one in records().checkpoints()) == BATCHES
            except AssertionError as error:
                different += 1
                print(f"run {number} differs: {error}")
    return done, different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["DET_PROGRESS"] = "0"
    torch.set_num_threads(1)
    kills, different = differences(arguments.ranks, arguments.kills, arguments.seed)
    print(f"{kills} kills of one of {arguments.ranks} ranks, seed {arguments.seed}: {different} runs ended differently")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
