"""What driving an experiment costs: many trials that do next to nothing, and a few that are busy.

A random search over a trial class that trains two batches, one checkpoint each: seconds a trial, the runner's memory
at its beginning and its end, the size of the database, and how long the page takes to show it. Then a search over busy
trials: the runner's share of a core, and the time from a validation that decides the fate of a trial to the end of that
trial.

    python benchmarks/experiments.py [--trials 1000] [--slots 2]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import psutil

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

from determined.experiment import control
from determined.tracking import Catalog, RunState
from driven import Experiments, config, eventually, experiments

LR = {"type": "double", "minval": 0.01, "maxval": 0.2}
MEGA = 1e6
LOOKS = 6
LONGEST, DIVISOR = 100, 10
"""Batches of a busy trial, and which part of them decides whether it may go on."""


def many(lab: Experiments, trials: int, slots: int) -> None:
    searcher = {"name": "random", "metric": "validation_loss", "max_trials": trials, "max_length": {"batches": 2}}
    settings = config(hyperparameters={"lr": LR}, searcher=searcher, min_checkpoint_period=None)
    began = time.monotonic()
    id = lab.create(settings, slots)
    runner = lab.runner(id)
    memory = []
    while not lab.state(id).is_final:
        time.sleep(1.0)
        try:
            memory.append((runner.memory_info().rss, runner.num_fds(), runner.num_threads()))
            cpu = sum(runner.cpu_times()[:2])
        except psutil.NoSuchProcess:
            break
    control.wait(id, 60, lab.home)
    took = time.monotonic() - began
    ended = sum(trial.state is RunState.COMPLETED for trial in lab.records.trials(id))
    tenth = max(len(memory) // 10, 1)
    print(f"{trials} trials on {slots} slots: {took / trials:.3f} s a trial, {ended} completed")
    print(
        f"  runner: {memory[tenth][0] / MEGA:.0f} MB after a tenth, {memory[-1][0] / MEGA:.0f} MB at the end; "
        f"{memory[tenth][1]} and {memory[-1][1]} open files, {memory[tenth][2]} and {memory[-1][2]} threads; "
        f"{cpu / trials * 1000:.0f} ms of CPU a trial"
    )
    size = sum(path.stat().st_size for path in lab.home.path.glob("tracking.db*"))
    print(f"  database: {size / MEGA:.1f} MB")
    page(lab, id)


def page(lab: Experiments, id: int) -> None:
    """Time the first look at an experiment, and one after something was stored."""
    command = [sys.executable, "-m", "determined.cli", "ui", "--port", "0"]
    environment = os.environ | {"DET_HOME": str(lab.home.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[4]
        try:
            trial = lab.records.trials(id)[0].id
            for path in ("", f"experiments/{id}", f"experiments/{id}/curves", f"trials/{trial}"):
                took = []
                for number in range(LOOKS):
                    Catalog(lab.home.database).change_experiment(
                        id, notes=str(number)
                    )  # else it would not be read again
                    began = time.monotonic()
                    with urllib.request.urlopen(url + path) as answer:
                        answer.read()
                    took.append(time.monotonic() - began)
                print(f"  page /{path}: the first time {took[0]:.2f} s, then {statistics.median(took[1:]):.2f} s")
        finally:
            server.terminate()


def busy(lab: Experiments, slots: int, seconds: float) -> None:
    searcher = {
        "name": "async_halving",
        "metric": "validation_loss",
        "time_metric": "batches",
        "num_rungs": 2,
        "max_trials": 1000,
        "max_time": LONGEST,
        "divisor": DIVISOR,
        "max_concurrent_trials": slots,
    }
    settings = config(hyperparameters={"lr": LR, "seconds": 0.1}, searcher=searcher, min_checkpoint_period=None)
    id = lab.create(settings, slots)
    eventually(lambda: len(lab.records.trials(id)) > slots)
    runner = lab.runner(id)
    began, cpu = time.monotonic(), sum(runner.cpu_times()[:2])
    time.sleep(seconds)
    share = (sum(runner.cpu_times()[:2]) - cpu) / (time.monotonic() - began)
    control.kill(id, lab.home)
    control.wait(id, 60, lab.home)
    delays = []
    with lab.store(id) as store:
        for trial in store.trials():
            reports = lab.records.metrics(trial.id, "validation")
            if trial.state is RunState.COMPLETED and reports[-1].metrics["batches"] < LONGEST:  # it was stopped
                decisive = next(report for report in reports if report.metrics["batches"] >= LONGEST // DIVISOR)
                delays.append((store.runs(trial.id)[-1].ended or 0.0) - decisive.time)
    print(f"busy trials on {slots} slots: the runner takes {share * 100:.1f} % of a core")
    print(
        f"  from a deciding validation to the end of the trial, with its checkpoint: median "
        f"{statistics.median(delays):.2f} s of {len(delays)}, at most {max(delays):.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, experiments(pathlib.Path(folder, "many")) as lab:
        many(lab, arguments.trials, arguments.slots)
    with tempfile.TemporaryDirectory() as folder, experiments(pathlib.Path(folder, "busy")) as lab:
        busy(lab, arguments.slots, arguments.seconds)


if __name__ == "__main__":
    main()
