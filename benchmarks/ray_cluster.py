"""What Ray adds to an experiment: the start of a trial of two ranks, and a search of many short trials.

    python benchmarks/ray_cluster.py [--repeats 5] [--trials 100]

Starts a Ray cluster of one node on this machine. Experiments run in turn locally and on it, with as many slots.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

from determined._home import Home
from determined.experiment import config as configs
from determined.experiment import control, create
from determined.tracking import TrackingReader
from driven import PROGRAM, config

SLOTS = 2


class Bench:
    """Runs experiments in a home folder of its own."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.home = Home(folder / "home")
        self.code = folder / "code"
        self.code.mkdir()
        (self.code / "program.py").write_text(PROGRAM)
        os.environ["DET_HOME"] = str(self.home.path)

    def run(self, settings: dict[str, Any], on: str | None) -> tuple[float, float, float]:
        """Return the seconds until the first validation of an experiment, from one trial to the next, and in all."""
        began, slots = time.time(), None if on else SLOTS
        id = create(configs.from_map(settings), self.code, at=self.home, slots=slots, on=on)
        control.activate(id, self.home, slots)
        control.wait(id, 600, self.home)
        ended = time.time()
        records = TrackingReader(self.home.database)
        times = sorted(records.metrics(trial.id, "validation")[0].time for trial in records.trials(id))
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return times[0] - began, statistics.median(gaps), ended - began


def compare(bench: Bench, settings: dict[str, Any], repeats: int) -> dict[str, list[tuple[float, float, float]]]:
    """Return the times of an experiment on both, in turn."""
    found: dict[str, list[tuple[float, float, float]]] = {"local": [], "ray": []}
    for _ in range(repeats):
        for name in found:
            found[name].append(bench.run(settings, None if name == "local" else "ray"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trials", type=int, default=100)
    arguments = parser.parse_args()
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": SLOTS, "object_store_memory": 100 << 20, "include_dashboard": False},
    )
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        with tempfile.TemporaryDirectory() as folder:
            report(Bench(pathlib.Path(folder)), arguments.repeats, arguments.trials)
    finally:
        cluster.shutdown()


def report(bench: Bench, repeats: int, trials: int) -> None:
    """Print both comparisons."""
    searcher = {"name": "random", "metric": "validation_loss", "max_length": {"batches": 2}}
    lr = {"lr": {"type": "double", "minval": 0.01, "maxval": 0.3}}
    resources = {"slots_per_trial": SLOTS}
    two_ranks = config(resources=resources, hyperparameters=lr, searcher={**searcher, "max_trials": 6})
    found = compare(bench, two_ranks, repeats)
    for place, what in enumerate(("create to the first validation", "from one trial to the next")):
        medians = {name: statistics.median(times[place] for times in of_one) for name, of_one in found.items()}
        pairs = zip(found["ray"], found["local"], strict=True)
        ratio = statistics.median(ray[place] / local[place] for ray, local in pairs)
        print(f"2 ranks, {what}: local {medians['local']:.2f} s, Ray {medians['ray']:.2f} s, ratio {ratio:.2f}")
    if trials:
        many = compare(bench, config(hyperparameters=lr, searcher={**searcher, "max_trials": trials}), 1)
        local, ray = many["local"][0][2], many["ray"][0][2]
        print(f"{trials} trials of two batches: local {local:.1f} s, Ray {ray:.1f} s")
        print(f"Ray costs {(ray - local) / trials:+.3f} s a trial")


if __name__ == "__main__":
    main()
