"""Kill the runner of a search, its trials, or all of them at random moments, go on, and compare with a quiet search.

python tests/torture/experiment_kills.py [--kills 50] [--seed 1] [--only asha]
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

from determined.experiment import SearchReplay, control
from determined.experiment import config as configs
from determined.tracking import RunState
from driven import Experiments, config, eventually, experiments

LR = {"type": "log", "minval": -3, "maxval": -1}
SEARCHES: dict[str, dict[str, Any]] = {
    "random": {"name": "random", "metric": "validation_loss", "max_trials": 6, "max_length": {"batches": 40}},
    "asha": {
        "name": "async_halving",
        "metric": "validation_loss",
        "time_metric": "batches",
        "max_time": 48,
        "num_rungs": 3,
        "max_trials": 8,
        "max_concurrent_trials": 1,  # with more of them the order of events is that of chance
    },
}
ALL_GONE_WITHIN = 10.0


def settings(search: str) -> dict[str, Any]:
    return config(
        hyperparameters={"lr": LR, "seconds": 0.02}, searcher=SEARCHES[search], max_restarts=1000, name=search
    )


def compared(lab: Experiments, id: int, search: str) -> Any:
    """Return what must not depend on interruptions: of a search that stops trials, its decisions."""
    outcome = lab.outcome(id)
    if search == "random":
        return outcome
    parsed = configs.from_map(settings(search))
    with lab.store(id) as store:
        decided = SearchReplay(parsed, store, lab.home.code(id))._search.state()
    return [trial[:4] for trial in outcome], decided


def harm(lab: Experiments, id: int, chance: random.Random) -> str:
    """Kill something of a running experiment, and return what."""
    runner = lab.runner(id)
    others = [process for process in lab.processes() if process.pid != runner.pid]
    what = chance.choice(["runner", "one", "all"])
    doomed: dict[str, Callable[[], list[psutil.Process]]] = {
        "runner": lambda: [runner],
        "one": lambda: [chance.choice(others)] if others else [runner],
        "all": lambda: chance.sample([runner, *others], len(others) + 1),
    }
    for process in doomed[what]():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return what


def survive(lab: Experiments, id: int, chance: random.Random, most_kills: int) -> tuple[int, float]:
    """Interrupt an experiment until it has ended; returns how often, and the longest time that orphans lived."""
    kills, longest = 0, 0.0
    while not lab.state(id).is_final:
        if not control.is_run(id, lab.home):
            began = time.monotonic()
            eventually(lambda: not lab.processes(), ALL_GONE_WITHIN)
            longest = max(longest, time.monotonic() - began)
            control.activate(id, lab.home, slots=2)
        if kills < most_kills:
            time.sleep(chance.uniform(0.0, 6.0))
            if control.is_run(id, lab.home) and not lab.state(id).is_final:
                with contextlib.suppress(psutil.NoSuchProcess):
                    harm(lab, id, chance)
                    kills += 1
        else:
            time.sleep(0.2)
    return kills, longest


def torture(folder: pathlib.Path, search: str, kills: int, seed: int) -> bool:
    """Return whether a search that was interrupted so often found what a quiet one found."""
    with experiments(folder / "quiet") as lab:
        id = lab.run(settings(search), slots=2)
        expected = compared(lab, id, search)
    done, longest, rounds, differences = 0, 0.0, 0, 0
    chance = random.Random(seed)
    while done < kills:
        rounds += 1
        with experiments(folder / f"harmed-{rounds}") as lab:
            id = lab.create(settings(search), slots=2)
            more, orphans = survive(lab, id, chance, kills - done)
            done, longest = done + more, max(longest, orphans)
            if lab.state(id) is not RunState.COMPLETED or compared(lab, id, search) != expected:
                differences += 1
                print(f"round {rounds} ended as {lab.state(id)}:\n{compared(lab, id, search)}\nnot\n{expected}")
                for trial in lab.records.trials(id):
                    print(f"trial {trial.id} is {trial.state}: {[run.reason for run in lab.records.runs(trial.id)]}")
    print(
        f"{search}: {done} kills in {rounds} searches, {differences} differences; "
        f"nothing of a killed runner lived longer than {longest:.1f} s",
        flush=True,
    )
    return not differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[*SEARCHES, ""], default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ends = [
            torture(pathlib.Path(folder, search), search, arguments.kills, arguments.seed)
            for search in SEARCHES
            if arguments.only in ("", search)
        ]
    return 0 if all(ends) else 1


if __name__ == "__main__":
    sys.exit(main())
