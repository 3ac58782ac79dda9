"""How long a search takes to its best score: Resolute's asynchronous halving, and Ray Tune's ASHA.

The same search for both: the model, data and search space of examples/digits; the same hyperparameters and seeds, drawn
once and given to both; the same rungs, divisor and longest training; as many trials at once, one for each slot, with as
many compute threads each. Each search is one command in a fresh process, from its start to its end; the two take turns.
Ray Tune keeps its workers from trial to trial (`reuse_actors`), and has no dashboard and no files of metrics; Resolute
keeps its record, TensorBoard files and logs, and follows the experiment as `--follow` does.

Without --checkpoints, Ray Tune saves none, and Resolute one at the end of each trial, which it always does. With it,
both save after each validation.

Ray is installed in an environment of its own under .bench/, with this environment's torch. The figures are left there.

    python benchmarks/search_speed.py [--rounds 5] [--trials 24] [--max-time 9] [--slots 2] [--checkpoints]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from _environments import CannotInstall
from _figures import median
from _searches import Outcome, Plan, RayTune, Resolute, Side

GOOD = 0.97
MEGA = 1e6

Measure = Callable[[Outcome], float]
Outcomes = dict[str, list[Outcome]]


def sides(environments: pathlib.Path) -> list[Side]:
    """Return who takes part; say so if that is Resolute alone."""
    try:
        return [RayTune(environments), Resolute()]
    except CannotInstall as error:
        print(f"Ray Tune is left out, since it cannot be installed: {error}", flush=True)
        return [Resolute()]


def search(side: Side, plan: Plan, *, watched: bool = False) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        outcome = side.run(plan, pathlib.Path(folder), watched=watched)
    by_seed = sorted(outcome.points, key=lambda point: point["seed"])
    if by_seed != sorted(plan.points(), key=lambda point: point["seed"]):
        raise SystemExit(f"{side.name} tried other hyperparameters than those it was given.")
    print(
        f"  {side.name:9} best {outcome.best:.4f}, ended after {outcome.search:.1f} s, {outcome.epochs:.0f} epochs "
        f"(load before: {outcome.load:.1f})",
        flush=True,
    )
    return outcome


def measure(contenders: Sequence[Side], plan: Plan, rounds: int) -> tuple[Outcomes, Outcomes]:
    """Return the outcomes of all rounds, and those of one before them, in which memory was watched."""
    print("a round to watch memory, which is not timed:", flush=True)
    watched = {side.name: [search(side, plan, watched=True)] for side in contenders}
    timed: Outcomes = {side.name: [] for side in contenders}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}:", flush=True)
        for side in contenders[:: 1 if number % 2 == 0 else -1]:
            timed[side.name].append(search(side, plan))
    return timed, watched


def quantities(timed: Outcomes) -> dict[str, Measure]:
    """Return what is compared; the best score is the best that every search reached."""
    shared = min(outcome.best for outcomes in timed.values() for outcome in outcomes)
    good = min(GOOD, shared)
    return {
        "s until the search begins": lambda one: one.ready,
        "s to the first score": lambda one: one.reports[0][0],
        f"s to {good:.1%}": lambda one: one.reached(good),
        f"s to {shared:.2%}, the best of all": lambda one: one.reached(shared),
        f"s from the beginning to {shared:.2%}": lambda one: one.reached(shared) - one.ready,
        "s to the end of the search": lambda one: one.search,
        "s from the beginning to the end": lambda one: one.search - one.ready,
        "s to the end of the command": lambda one: one.command,
        "epochs trained": lambda one: one.epochs,
        "best score, %": lambda one: one.best * 100,
    }


def table(timed: Outcomes, watched: Outcomes) -> list[str]:
    """Return a line for each quantity, with the median over the rounds of Resolute's part of Ray Tune's."""
    names, ours, others = list(timed), timed["Resolute"], timed.get("Ray Tune", [])
    lines = [f"{'median (lowest to highest)':34}" + "".join(f"{name:>24}" for name in names) + f"{'ratio':>8}"]
    for title, measured in quantities(timed).items():
        cells = "".join(f"{spread([measured(one) for one in timed[name]]):>24}" for name in names)
        ratios = [measured(one) / measured(other) for one, other in zip(ours, others, strict=False)]
        lines.append(f"{title:34}{cells}" + (f"{median(ratios):8.2f}" if ratios else ""))
    cpu = "".join(f"{watched[name][0].cpu_seconds:>24.0f}" for name in names)
    peaks = "".join(f"{watched[name][0].peak_bytes / MEGA:>24.0f}" for name in names)
    return [*lines, f"{'CPU time, all processes, s':34}{cpu}", f"{'peak memory, all processes, MB':34}{peaks}"]


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def explained(plan: Plan) -> str:
    searcher = plan.settings["searcher"]
    saved = (
        "both save a checkpoint after each validation"
        if plan.checkpoints
        else "Ray Tune saves no checkpoints, Resolute one at the end of each trial"
    )
    return (
        f"{searcher['max_trials']} trials of up to {searcher['max_time']} epochs, on {plan.slots} slots with "
        f"{plan.threads} threads each; {saved}"
    )


def save(path: pathlib.Path, facts: dict[str, object], timed: Outcomes, watched: Outcomes) -> None:
    found = {
        kind: {name: [dataclasses.asdict(one) for one in outcomes] for name, outcomes in kept.items()}
        for kind, kept in (("timed", timed), ("watched", watched))
    }
    path.write_text(json.dumps({**facts, **found}, indent=1))
    print(f"figures: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--max-time", type=int, default=9, help="epochs of a trial that is never stopped")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path(".bench"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    plan = Plan.of_example(arguments.slots, arguments.trials, arguments.max_time, arguments.checkpoints)
    contenders = sides(arguments.folder)
    timed, watched = measure(contenders, plan, arguments.rounds)
    versions = {side.name: side.version for side in contenders} | {"torch": importlib.metadata.version("torch")}
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    print(f"{machine}; {', '.join(f'{name} {version}' for name, version in versions.items())}")
    print(explained(plan))
    print("\n".join(table(timed, watched)))
    facts: dict[str, object] = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "command": sys.argv}
    name = "search_speed_checkpoints.json" if plan.checkpoints else "search_speed.json"
    save(arguments.folder / name, {**facts, "versions": versions}, timed, watched)


if __name__ == "__main__":
    main()
