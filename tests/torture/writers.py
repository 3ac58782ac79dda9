"""Let many trials report at once for a long time while somebody looks at them, and count what is stored.

Each writer is a process with a trial of its own that reports as training does: what has gathered for a moment goes into
the record together. Another process makes the pages of all experiments all the while. In the end the record must hold
what was acknowledged, no more and no less, and nobody may have been turned away by a lock. With `--server` the record
is on a PostgreSQL server, which is stopped, crashed and started again all the while.

    python tests/torture/writers.py [--rate 10000] [--writers 8] [--seconds 300] [--server]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import queue
import random
import socket
import statistics
import sys
import tempfile
import time
from typing import Any

import psutil

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

import postgres_server
from determined import tracking
from determined._home import Home
from determined.web._pages import Pages

GATHERED = 0.25
"""Seconds for which a writer gathers reports."""
LOOKS_EVERY = 1.0
RESTARTS_EVERY = 3.0


@dataclasses.dataclass(frozen=True)
class Done:
    """What one process has done."""

    trial_id: int
    reports: int
    seconds: list[float]
    """How long each of its calls took."""


def describe() -> tracking.RunDescription:
    return tracking.RunDescription(
        name="writers",
        config=None,
        hparams={"lr": 0.1},
        seed=0,
        entrypoint="writers.py",
        torch_version=None,
        resolute_version="",
        git_commit=None,
        pid=os.getpid(),
        process_started=psutil.Process().create_time(),
        host=socket.gethostname(),
    )


def write(database: str | pathlib.Path, rate: float, seconds: float, barrier: Any, results: Any) -> None:
    """Report so many times a second, and say how often and how quickly that was acknowledged."""
    done, took = 0, []
    with tracking.TrialWriter.start(database, describe()) as recorder:
        barrier.wait()
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            due = range(done + 1, int(now * rate) + 1)
            reports = [
                tracking.MetricReport(
                    group="training", steps_completed=step, metrics={"loss": 1.0 / step}, time=time.time()
                )
                for step in due
            ]
            called = time.monotonic()
            tracking.when_available(lambda reports=reports: recorder.write(reports), wait=lambda _: time.sleep(0.05))
            took.append(time.monotonic() - called)
            done += len(due)
            time.sleep(max(0.0, GATHERED - (time.monotonic() - called)))
        results.put(Done(recorder.trial_id, done, took))


def look(home: Home, seconds: float, barrier: Any, results: Any) -> None:
    """Look at all experiments, their validations and checkpoints again and again, by the pages that show them."""
    pages = Pages(home)
    barrier.wait()
    began, took = time.monotonic(), []
    while time.monotonic() - began < seconds:
        called = time.monotonic()
        look_once(pages)
        took.append(time.monotonic() - called)
        time.sleep(LOOKS_EVERY)
    results.put(Done(0, 0, took))


def look_once(pages: Pages) -> None:
    for experiment in tracking.when_available(lambda: pages.experiments({})).context["selection"].rows:
        tracking.when_available(lambda id=experiment.id: pages.experiment({}, id))
        tracking.when_available(lambda id=experiment.id: pages.experiment_curves({}, id))


def gather(results: Any, count: int, server: postgres_server.Server | None, timeout: float) -> tuple[list[Done], int]:
    """Return what the processes have done, and how often the server was started again meanwhile."""
    done: list[Done] = []
    restarts, deadline = 0, time.monotonic() + timeout
    while len(done) < count:
        assert time.monotonic() < deadline, "the writers do not end"
        try:
            done.append(results.get(timeout=timeout if server is None else random.uniform(0.3, RESTARTS_EVERY)))
        except queue.Empty:
            if server is not None and not done:
                server.stop(at_once=random.random() < 0.5)
                time.sleep(random.uniform(0.0, 1.0))
                server.start()
                restarts += 1
    return done, restarts


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=10_000.0, help="reports a second, of all writers")
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--server", action="store_true", help="on a PostgreSQL server that restarts all the while")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(arguments.writers + 2), context.Queue()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(postgres_server.server()) if arguments.server else None
        home = Home(folder, None if server is None else server.url)
        writing = (home.database, arguments.rate / arguments.writers, arguments.seconds, barrier, results)
        processes = [context.Process(target=write, args=writing) for _ in range(arguments.writers)]
        processes.append(context.Process(target=look, args=(home, arguments.seconds, barrier, results)))
        for process in processes:
            process.start()
        barrier.wait()  # all have opened the database, which those who cannot are told at once
        done, restarts = gather(results, len(processes), server, arguments.seconds + 120)
        for process in processes:
            process.join(60)
        failed = sum(process.exitcode != 0 for process in processes)
        writers = [one for one in done if one.trial_id]
        looks = [second for one in done if not one.trial_id for second in one.seconds]
        records = tracking.TrackingReader(home.database)
        lost = sum(
            [report.steps_completed for report in records.metrics(one.trial_id)] != list(range(1, one.reports + 1))
            for one in writers
        )
        size = home.database.stat().st_size if isinstance(home.database, pathlib.Path) else 0
    acknowledged = sum(one.reports for one in writers)
    calls = [second * 1000 for one in writers for second in one.seconds]
    print(
        f"{acknowledged:,} reports in {arguments.seconds:g} s ({acknowledged / arguments.seconds:,.0f} a second) by "
        f"{len(writers)} writers: {failed} failed, {lost} trials with other reports than acknowledged"
        + (f"; {restarts} restarts of the server" if server else "")
    )
    print(
        f"  a write takes {statistics.median(calls):.1f} ms in the median, {percentile(calls, 99):.1f} ms at the 99th "
        f"percentile, {max(calls):.0f} ms at most; a look {statistics.median(looks) * 1000:.0f} ms in the median; "
        f"database {size / 1e6:.0f} MB"
    )
    return 1 if failed or lost else 0


if __name__ == "__main__":
    sys.exit(main())
