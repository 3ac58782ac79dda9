"""A driven experiment as a runner and its trials write it."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from determined import tracking

CONFIG = {"searcher": {"name": "random", "metric": "loss"}}


def describe(**changes: Any) -> tracking.ExperimentDescription:
    return tracking.ExperimentDescription(**({"name": "search", "config": CONFIG} | changes))


def event(number: int, request_id: str | None = None, **payload: Any) -> tracking.SearchEvent:
    return tracking.SearchEvent(
        number=number, kind="validated", request_id=request_id, payload=payload or {"n": number}, time=50.0 + number
    )


def new_trial(request_id: str, **changes: Any) -> tracking.NewTrial:
    fields: dict[str, Any] = {"request_id": request_id, "hparams": {"lr": 0.1}, "seed": 3, "entrypoint": "model:Trial"}
    return tracking.NewTrial(**(fields | changes))


def claimed(database: str | pathlib.Path, **changes: Any) -> tracking.ExperimentStore:
    """The store of a new experiment that this process runs."""
    store = tracking.ExperimentStore.create(database, describe(**changes))
    store.claim()
    return store


def add_trials(store: tracking.ExperimentStore, count: int = 1, run: bool = True) -> list[int]:
    """Add trials, and begin the first run of each."""
    known = len(store.trials())
    ids = store.commit(tracking.Changeset(new_trials=[new_trial(f"request {known + i}") for i in range(count)]))
    if run:
        begin_runs(store, ids)
    return ids


def begin_runs(store: tracking.ExperimentStore, ids: Sequence[int], run_id: int = 1, step: int = 0) -> None:
    changes = [tracking.TrialChange(trial_id=id, run_id=run_id, started_from_step=step) for id in ids]
    store.commit(tracking.Changeset(trial_changes=changes))


def report(step: int, group: str = "validation", **metrics: Any) -> tracking.MetricReport:
    return tracking.MetricReport(group=group, steps_completed=step, metrics=metrics, time=100.0 + step)


def saved(uuid: str, step: int = 10) -> tracking.CheckpointSaved:
    return tracking.CheckpointSaved(
        uuid=uuid, steps_completed=step, path=f"/store/{uuid}", metadata={}, resources={"a": 1}, time=5.0
    )


def ended_process() -> tracking.RunProcess:
    """A process of this machine that is gone."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = tracking.RunProcess.of(process.pid)
        process.communicate(b"\n", timeout=60)
    return found


def elsewhere() -> tracking.RunProcess:
    return tracking.RunProcess(pid=4242, started=1000.0, host="elsewhere")


def reused_pid() -> tracking.RunProcess:
    """A process that is gone, and whose id is now that of this one."""
    here = tracking.RunProcess.current()
    assert here.identity is not None
    return dataclasses.replace(here, identity=dataclasses.replace(here.identity, start=1))
