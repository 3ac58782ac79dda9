"""The two sides of benchmarks/search_speed.py: each runs one search as a command, and tells what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any, Protocol

import yaml
from _environments import make, share
from _footprint import Footprint

import determined
from determined._home import Home
from determined.experiment import config as configs
from determined.experiment import control
from determined.experiment.search import Began, Create, Search, Validated
from determined.tracking import RunState, TrackingReader

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "digits"
METRIC = "validation_accuracy"
_LONGEST = 900.0
_PARTING = 20.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """One search, for both sides: the example's space and seed, one bracket of rungs."""

    settings: dict[str, Any]
    """As an experiment config."""
    slots: int
    checkpoints: bool
    """Whether trials save after each validation."""

    @classmethod
    def of_example(cls, slots: int, trials: int, max_time: int, checkpoints: bool) -> Plan:
        settings = yaml.safe_load((EXAMPLE / "adaptive.yaml").read_text())
        divisor, rungs = settings["searcher"]["divisor"], 1
        while divisor**rungs <= max_time:
            rungs += 1
        changes = {"max_trials": trials, "max_time": max_time, "num_rungs": rungs, "max_concurrent_trials": slots}
        settings["searcher"] |= {"name": "async_halving", **changes}
        settings["checkpoint_policy"] = "all" if checkpoints else "none"
        return cls(settings, slots, checkpoints)

    @property
    def threads(self) -> int:
        """Compute threads of a trial: all trials together use every core once."""
        return max(1, len(os.sched_getaffinity(0)) // self.slots)

    @property
    def first_rung(self) -> int:
        searcher = self.settings["searcher"]
        return max(1, searcher["max_time"] // searcher["divisor"] ** (searcher["num_rungs"] - 1))

    def points(self) -> list[dict[str, Any]]:
        """Return the hyperparameters and seeds of all trials, as our search draws them, whatever their metrics are."""
        config = configs.from_map(self.settings)
        search = Search(config.searcher, config.hyperparameters, config.seed)
        found = []
        pending = search.handle(Began())
        while pending:
            operation = pending.pop(0)
            if isinstance(operation, Create):
                found.append({**operation.hparams, "seed": operation.seed})
                last = self.settings["searcher"]["max_time"]
                pending += search.handle(Validated(operation.request_id, 0.0, last))  # which ends it, for another one
        return found


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one search. Times are seconds since its command was started."""

    ready: float
    """When the search could begin."""
    reports: list[tuple[float, float]]
    """When which score was reported, in the order of time."""
    search: float
    """When the search had ended."""
    command: float
    """When the command had ended."""
    epochs: float
    points: list[dict[str, Any]]
    peak_bytes: int
    """Of all processes together; 0 if nobody looked."""
    cpu_seconds: float
    """As above."""
    load: float

    @property
    def best(self) -> float:
        return max(score for _, score in self.reports)

    def reached(self, score: float) -> float:
        """Return when a score was first reported."""
        return next(moment for moment, its in self.reports if its > score - 1e-6)


class Side(Protocol):
    """One way to search."""

    name: str
    version: str

    def run(self, plan: Plan, folder: pathlib.Path, *, watched: bool) -> Outcome:
        """Search in an empty folder; look at memory on the way if asked to."""


class Resolute:
    """The example as it is, in the runner that `det experiment create` starts."""

    name = "Resolute"
    version = determined.__version__

    def run(self, plan: Plan, folder: pathlib.Path, *, watched: bool) -> Outcome:
        home = Home(folder / "home")
        (folder / "search.yaml").write_text(yaml.safe_dump(plan.settings))
        create = [sys.executable, "-m", "determined.cli", "experiment", "create"]
        command = [*create, str(folder / "search.yaml"), str(EXAMPLE), "--slots", str(plan.slots), "--follow"]
        run = Run(command, folder, {"DET_HOME": str(home.path), **_own_path()})
        try:
            run.wait(watched)
        finally:
            _end(home)
        return self._outcome(run, TrackingReader(home.database), plan)

    def _outcome(self, run: Run, records: TrackingReader, plan: Plan) -> Outcome:
        experiment, trials = records.experiment(1), records.trials(1)
        if failed := [trial.id for trial in trials if trial.state is not RunState.COMPLETED]:
            raise RuntimeError(f"trials {failed} did not complete:\n{run.last_lines()}")
        reports = [report for trial in trials for report in records.metrics(trial.id, "validation")]
        batches_an_epoch = reports[0].metrics["batches"] / reports[0].metrics["epochs"]
        return run.outcome(
            began=min(records.runs(trial.id)[0].started for trial in trials),
            ended=experiment.ended or 0.0,
            reports=[(report.time, report.metrics[METRIC]) for report in reports],
            epochs=sum(trial.steps_completed for trial in trials) / batches_an_epoch,
            points=[{**trial.hparams, "seed": trial.seed} for trial in trials],
        )


class RayTune:
    """The example's model in a plain loop, with Ray Tune's ASHA."""

    name = "Ray Tune"

    def __init__(self, environments: pathlib.Path) -> None:
        """Make the environment on first use; `CannotInstall` where Ray is not to be had."""
        share(environments / "shared")
        needs = environments / "ray_search.txt"
        needs.write_text(f"ray[tune]\nscikit-learn=={importlib.metadata.version('scikit-learn')}\n")
        needed = f"--requirement={needs.absolute()}"
        self._python = make(environments / "ray_search", needed, environments / "shared").absolute()
        self.version = ""

    def run(self, plan: Plan, folder: pathlib.Path, *, watched: bool) -> Outcome:
        result, searcher = folder / "result.json", plan.settings["searcher"]
        (folder / "plan.json").write_text(
            json.dumps(
                {
                    "points": plan.points(),
                    "max_time": searcher["max_time"],
                    "divisor": searcher["divisor"],
                    "first_rung": plan.first_rung,
                    "slots": plan.slots,
                    "threads": plan.threads,
                    "checkpoints": plan.checkpoints,
                    "example": str(EXAMPLE),
                    "session": str(folder / "session"),
                    "storage": str(folder / "storage"),
                }
            )
        )
        script = pathlib.Path(__file__).with_name("_ray_search.py")
        # A home of its own, since Ray leaves files there.
        command = [str(self._python), str(script), str(folder / "plan.json"), str(result)]
        run = Run(command, folder, {"HOME": str(folder)})
        run.wait(watched)
        return self._outcome(run, json.loads(result.read_text()))

    def _outcome(self, run: Run, found: dict[str, Any]) -> Outcome:
        if found["failed"]:
            raise RuntimeError(f"{found['failed']} trials failed:\n{run.last_lines()}")
        self.version = found["version"]
        reports = [report for trial in found["trials"] for report in trial["reports"]]
        return run.outcome(
            began=found["began"],
            ended=found["ended"],
            reports=[(moment, score) for moment, _, score in reports],
            epochs=len(reports),
            points=[trial["point"] for trial in found["trials"]],
        )


class Run:
    """A command that was started now."""

    def __init__(self, command: list[str], folder: pathlib.Path, variables: dict[str, str]) -> None:
        self._log = folder / "log.txt"
        # Compiled modules are kept, as they are after an installation.
        left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        inherited = {name: value for name, value in os.environ.items() if name not in left_out}
        self._load = os.getloadavg()[0]
        self._peak_bytes, self._cpu_seconds = 0, 0.0
        with self._log.open("wb") as log:
            self._started = time.time()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**inherited, "CUDA_VISIBLE_DEVICES": "", **variables},
            )

    def wait(self, watched: bool) -> None:
        """Wait for its end."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop)
            footprint = stack.enter_context(Footprint(self._process)) if watched else None
            status = self._process.wait(_LONGEST)
            self._ended = time.time()
        if status:
            raise RuntimeError(f"it ended with status {status}:\n{self.last_lines()}")
        if footprint:
            self._peak_bytes, self._cpu_seconds = footprint.peak_bytes, footprint.cpu_seconds

    def _stop(self) -> None:
        """End it, if it has not ended; it ends what it has started."""
        self._process.terminate()
        try:
            self._process.wait(_PARTING)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])

    def outcome(
        self,
        *,
        began: float,
        ended: float,
        reports: list[tuple[float, float]],
        epochs: float,
        points: list[dict[str, Any]],
    ) -> Outcome:
        return Outcome(
            ready=began - self._started,
            reports=sorted((moment - self._started, score) for moment, score in reports),
            search=ended - self._started,
            command=self._ended - self._started,
            epochs=epochs,
            points=points,
            peak_bytes=self._peak_bytes,
            cpu_seconds=self._cpu_seconds,
            load=self._load,
        )


def _own_path() -> dict[str, str]:
    """Return where this library is found, absolute, since the command runs in another folder."""
    paths = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))} if paths else {}


def _end(home: Home) -> None:
    """Leave nothing running, also of a search that was broken off."""
    if any(not one.state.is_final for one in TrackingReader(home.database).experiments()):
        control.kill(1, home)
        control.wait(1, 60.0, home)
