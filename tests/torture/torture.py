"""Kill a training again and again, let it go on by itself, and compare how it ends with a run that was let alone.

`python tests/torture/torture.py --kills 200` prints the counts and every seed; its status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import findings
from course import DIGEST, RunObservations, ending_with_a_checkpoint
from training import PROGRAM, RunExit, train

FAULT_POINTS = ("staged", "filled", "synced", "manifested", "renamed", "committed", "recorded")
"""Points of the commit of a checkpoint at which `DET_DIE_AT` makes a process kill itself."""

AT_FAULT_POINT, IN_A_WINDOW, STOPS = 0.4, 0.05, 0.1
"""The shares of kills at a fault point, of stops by SIGTERM in the middle of a window, by which each run begins too,
and of those at a random instant; the others are kills at a random instant."""

MOST_KILLS = 25
"""Kills of one run before it is let alone to finish."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One of the trainings that are tortured."""

    workers: int
    aggregation: int
    course: RunObservations = dataclasses.field(default_factory=RunObservations)

    def arguments(self, seed: int) -> list[str]:
        own = {"workers": self.workers, "aggregation": self.aggregation, "seed": seed}
        return [f"--{name}={value}" for name, value in (own | dataclasses.asdict(self.course)).items()]

    @property
    def title(self) -> str:
        return f"w{self.workers}-a{self.aggregation}-c{self.course.checkpoint}"


SETTINGS = [
    *(Setting(workers, aggregation) for workers in (0, 2) for aggregation in (1, 4)),
    Setting(0, 1, ending_with_a_checkpoint(epochs=5)),
]
SHORT = [Setting(2, 4, ending_with_a_checkpoint(epochs=3))]
"""For a short check: only the one with most to lose."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a run that was let alone gave."""

    digests: dict[str, str]
    rows: list[findings.Row]
    seconds: float


@dataclasses.dataclass
class Counts:
    """What was found, summed over runs."""

    runs: int = 0
    stops: int = 0
    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.runs + other.runs, self.stops + other.stops, self.kills + other.kills, self.faults + other.faults
        )


def say(text: str) -> None:
    print(text, flush=True)


class Torturer:
    """Runs of one setting, one after another."""

    def __init__(self, folder: pathlib.Path, setting: Setting, training_seed: int, most_kills: int) -> None:
        self._folder = folder
        self._setting = setting
        self._most_kills = most_kills
        self._arguments = setting.arguments(training_seed)
        self._reference = self._measure()

    def torture(self, seed: int) -> Counts:
        """Do one run with kills until it has finished, and return what was found."""
        rng, counts, home = random.Random(seed), Counts(runs=1), self._home(f"run-{seed}")
        ended = self._stop(rng, home, counts)
        while True:
            if not (ended.was_killed or ended.was_stopped):
                break
            self._check_after_kill(home, counts)
            ended = self._attempt(rng, home, counts)
        self._check_end(home, ended, counts)
        faults = ", ".join(f"{count} {name}" for name, count in counts.faults.items()) or "as the reference"
        say(f"{self._setting} seed={seed}: {counts.kills.total()} kills, {counts.stops} stops, {faults}")
        return counts

    def _attempt(self, rng: random.Random, home: pathlib.Path, counts: Counts) -> RunExit:
        """Start the program once, to be killed or to finish."""
        kind = rng.random()
        if counts.kills.total() >= self._most_kills:
            ended = self._run(home)
        elif kind < AT_FAULT_POINT:
            point = rng.choice(FAULT_POINTS)
            ended = self._run(home, die_at=f"{point}:{rng.randint(1, 4)}")
            counts.kills[point] += ended.was_killed
        elif kind < AT_FAULT_POINT + IN_A_WINDOW:
            ended = self._stop(rng, home, counts)
        else:
            signum = signal.SIGTERM if kind < AT_FAULT_POINT + IN_A_WINDOW + STOPS else signal.SIGKILL
            ended = self._run(home, after=rng.uniform(0, self._reference.seconds), signum=signum)
            counts.kills["any instant"] += ended.was_killed
            counts.stops += ended.was_stopped
        counts.faults["unreadable latest checkpoints"] += ended.output.count("is passed over")
        return ended

    def _stop(self, rng: random.Random, home: pathlib.Path, counts: Counts) -> RunExit:
        """Start the program once, to be stopped where the metrics of a window are half gathered."""
        begin = findings.saved_steps(home)
        course = self._setting.course
        inside = [batch for batch in range(begin, course.length) if not course.ends_a_window(batch + 1)]
        # One of the next few, so that something is left to be killed in.
        ended = self._run(home, stop_at=rng.choice(inside[:8] or [course.length]))
        counts.stops += ended.was_stopped
        return ended

    def _run(self, home: pathlib.Path, die_at: str = "", stop_at: int = -1, **signal_at: Any) -> RunExit:
        environment = {"DET_HOME": str(home), "DET_DIE_AT": die_at}
        arguments = [*self._arguments, f"--stop-at={stop_at}"]
        return train(arguments, environment, home.with_suffix(".log"), **signal_at)

    def _check_after_kill(self, home: pathlib.Path, counts: Counts) -> None:
        for what, found in {
            "unreadable checkpoints": findings.unreadable(home),
            "lost metrics": findings.lost(home, self._reference.rows),
        }.items():
            for one in found:
                say(f"  {what}: {one}")
            counts.faults[what] += len(found)

    def _check_end(self, home: pathlib.Path, ended: RunExit, counts: Counts) -> None:
        if ended.code != 0:
            say(f"  the program failed with status {ended.code}:\n{ended.output}")
            counts.faults["failed runs"] += 1
            return
        differing = [part for part, sha in _digests(ended).items() if sha != self._reference.digests[part]]
        if differing:
            say(f"  differences in {', '.join(differing)}")
        counts.faults["differences"] += bool(differing)
        counts.faults["leftover folders"] += len(findings.leftovers(home))
        self._check_after_kill(home, counts)
        self._check_again(home, counts)
        counts.faults += collections.Counter()  # drops those that did not occur

    def _check_again(self, home: pathlib.Path, counts: Counts) -> None:
        """Start the finished run once more, which must write nothing."""
        before = findings.rows(home), findings.checkpoints(home)
        self._run(home)
        counts.faults["writes of finished runs"] += (findings.rows(home), findings.checkpoints(home)) != before

    def _measure(self) -> Reference:
        """Run the program in a process of its own and forked, which must give the same."""
        alone = subprocess.run(
            [sys.executable, PROGRAM, *self._arguments],
            env={**os.environ, "DET_HOME": str(self._home("alone"))},
            check=True,
            capture_output=True,
            text=True,
        )
        home = self._home("reference")
        ended = self._run(home)
        digests = _digests(ended)
        assert digests == _digests(RunExit(0, alone.stdout)), f"a forked run is not like one alone: {ended.output}"
        say(f"{self._setting}: reference {digests['all']} in {ended.seconds:.2f} s, alone and forked")
        return Reference(digests, findings.rows(home), ended.seconds)

    def _home(self, name: str) -> pathlib.Path:
        return self._folder / f"{self._setting.title}-{name}"


def _digests(ended: RunExit) -> dict[str, str]:
    """Return the digests that a run printed."""
    lines = [line for line in ended.output.splitlines() if line.startswith(DIGEST)]
    if len(lines) != 1:
        raise RuntimeError(f"the program ended with status {ended.code} and without digests:\n{ended.output}")
    digests: dict[str, str] = json.loads(lines[0].removeprefix(DIGEST))
    return digests


def torture_setting(setting: Setting, kills: int, seed: int, folder: pathlib.Path) -> Counts:
    """Torture one setting until it was killed often enough."""
    counts = Counts()
    torturer = Torturer(folder, setting, training_seed=seed % 1000, most_kills=min(kills, MOST_KILLS))
    for run_seed in itertools.count(seed):
        counts += torturer.torture(run_seed)
        if counts.kills.total() >= kills:
            return counts
    raise AssertionError("the count of seeds has no end")


def results(kills: int, seed: int, jobs: int, settings: list[Setting]) -> Iterator[Counts]:
    """Give the counts of each setting, several of which are tortured at once."""
    with tempfile.TemporaryDirectory(prefix="torture-") as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        each = -(-kills // len(settings))
        tasks = [
            pool.submit(torture_setting, setting, each, seed + 1000 * number, pathlib.Path(folder))
            for number, setting in enumerate(settings)
        ]
        for task in tasks:
            yield task.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="at least so many, over all settings")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="to repeat a run")
    parser.add_argument("--jobs", type=int, default=2, help="settings at once")
    parser.add_argument("--short", action="store_true", help="a short training of one setting")
    given = parser.parse_args()
    say(f"seed {given.seed}")
    total = sum(results(given.kills, given.seed, given.jobs, SHORT if given.short else SETTINGS), Counts())
    by_cause = ", ".join(f"{count} at {cause}" for cause, count in total.kills.most_common())
    say(f"{total.kills.total()} kills and {total.stops} stops in {total.runs} runs: {by_cause}")
    names = ("differences", "failed runs", "unreadable latest checkpoints", "unreadable checkpoints", "lost metrics")
    others = ("leftover folders", "writes of finished runs")
    say(", ".join(f"{total.faults[name]} {name}" for name in (*names, *others)))
    return 1 if total.faults.total() else 0


if __name__ == "__main__":
    sys.exit(main())
