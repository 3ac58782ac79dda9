"""A tracking database to damage, and what reading it must give."""

from __future__ import annotations

import os
import pathlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from determined import tracking
from determined.errors import TrackingException

PAGE = 4096
RUNS = 3
REPORTS = 60

Read = Callable[[tracking.TrackingReader], Any]


def describe(number: int) -> tracking.RunDescription:
    return tracking.RunDescription(
        name=f"lines {number % 2}", config={"searcher": {"metric": "val_loss"}}, hparams={"lr": 0.1 * number},
        seed=number, entrypoint="train.py", torch_version=None, resolute_version="0", git_commit=None,
        pid=os.getpid(), process_started=0.0, host="elsewhere",
    )  # fmt: skip


def messages(number: int) -> Iterator[list[tracking.Message]]:
    """Yield what run `number` writes, a transaction at a time."""
    if number:
        yield [tracking.Continued(checkpoint=f"{number - 1}-aaaa", steps_completed=20, reported_steps=20)]
    for step in range(number, number + REPORTS):
        metrics = {"loss": 1 / (step + 1), "accuracy": step / 1000}
        yield [
            tracking.MetricReport(group="training", steps_completed=step, metrics=metrics, time=5.0 + step),
            tracking.ProgressChanged(progress=step / 100),
        ]
        if step % 10 == 0:
            scores = {"val_loss": 2 / (step + 1)}
            yield [tracking.MetricReport(group="validation", steps_completed=step, metrics=scores, time=5.0 + step)]
    for uuid in (f"{number}-aaaa", f"{number}-bbbb"):
        files = {f"file {i}": i for i in range(20)}
        yield [
            tracking.CheckpointSaved(
                uuid=uuid, steps_completed=20, path=f"/store/{uuid}", metadata={"a": 1}, resources=files, time=9.0
            )
        ]
    yield [tracking.CheckpointDeleted(uuid=f"{number}-bbbb")]


def write_runs(database: pathlib.Path) -> None:
    """Leave the database with its last reports still in its log, as a killed process does."""
    whole = database.parent / "whole"
    with tracking.TrialWriter.start(whole / database.name, describe(0)) as first:
        for one in messages(0):
            first.write(one)
        for number in range(1, RUNS):
            with tracking.TrialWriter.start(whole / database.name, describe(number)) as recorder:
                for one in messages(number):
                    recorder.write(one)
        for file in whole.iterdir():
            shutil.copy(file, database.parent)
    shutil.rmtree(whole)
    (database.parent / f"{database.name}-shm").unlink()


def into_one_file(database: pathlib.Path) -> bytes:
    """Move what is in the log into the database, and return that."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return database.read_bytes()


READS: dict[str, Read] = {
    "experiments": lambda records: records.experiments(),
    "newest": lambda records: records.experiments(limit=1),
    "sources": lambda records: records.sources(),
    "checkpoints": lambda records: records.checkpoints(),
    "by name": lambda records: records.checkpoints_of_experiments("lines 0"),
    **{f"experiment {i}": lambda records, i=i: records.experiment(i) for i in range(1, RUNS + 1)},
    **{f"trials {i}": lambda records, i=i: records.trials(i) for i in range(1, RUNS + 1)},
    **{f"trial {i}": lambda records, i=i: records.trial(i) for i in range(1, RUNS + 1)},
    **{f"metrics {i}": lambda records, i=i: records.metrics(i) for i in range(1, RUNS + 1)},
    **{f"validations {i}": lambda records, i=i: records.metrics(i, "validation") for i in range(1, RUNS + 1)},
    **{f"history {i}": lambda records, i=i: records.history(i) for i in range(1, RUNS + 1)},
    **{f"checkpoint {i}": lambda records, i=i: records.checkpoint(f"{i}-aa") for i in range(RUNS)},
}


def read_all(database: pathlib.Path) -> dict[str, Any]:
    """Return what each way of reading gives; None if it is refused."""
    found: dict[str, Any] = {}
    records = tracking.TrackingReader(database)
    for name, read in READS.items():
        try:
            found[name] = read(records)
        except TrackingException:
            found[name] = None
    return found


def wrong(found: dict[str, Any], truth: dict[str, Any]) -> list[str]:
    """Return the names of the reads that gave something else than the truth."""
    return [name for name, value in found.items() if value is not None and value != truth[name]]
