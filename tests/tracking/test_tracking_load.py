"""Many who write at once, and some who read for long."""

from __future__ import annotations

import itertools
import multiprocessing
import pathlib
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from determined import tracking

WRITERS = 8
WRITES = 25
MEGABYTE = 1 << 20


def report(step: int, **metrics: Any) -> tracking.MetricReport:
    return tracking.MetricReport(group="training", steps_completed=step, metrics=metrics, time=100.0)


@pytest.fixture
def long_reader(database: pathlib.Path, writer: tracking.TrialWriter) -> Iterator[sqlite3.Connection]:
    """Holds a transaction from before anything was reported until it is committed."""
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM metrics").fetchone()
        yield connection


def write_for_long(database: pathlib.Path, run: tracking.RunDescription, barrier: Any, is_shared: bool) -> None:
    barrier.wait(120)
    opened = tracking.TrialWriter.attach(database, 1, 1) if is_shared else tracking.TrialWriter.start(database, run)
    with opened as writer:
        for step in range(WRITES):
            writer.write(
                [report(step, loss=1.0), report(step, loss=2.0), tracking.ProgressChanged(progress=step / WRITES)]
            )


@pytest.mark.process
@pytest.mark.parametrize(
    "is_shared",
    [pytest.param(False, id="own trials", marks=pytest.mark.thorough), pytest.param(True, id="one trial")],
)
def test_eight_writers_never_wait_in_vain_for_each_other_a_reader_or_the_clearing_of_the_log(
    is_shared: bool,
    database: pathlib.Path,
    describe_run: Callable[..., Any],
    long_reader: sqlite3.Connection,
    reader: tracking.TrackingReader,
) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(WRITERS)
    arguments = (database, describe_run(), barrier, is_shared)
    processes = [context.Process(target=write_for_long, args=arguments) for _ in range(WRITERS)]
    for process in processes:
        process.start()
    modes = itertools.cycle(("PASSIVE", "FULL", "RESTART", "TRUNCATE"))
    with closing(sqlite3.connect(database, isolation_level=None, timeout=0.05)) as clearer:
        while alive := [process for process in processes if process.is_alive()]:
            # All but the first keep writers out for as long as they wait for the reader.
            clearer.execute(f"PRAGMA wal_checkpoint({next(modes)})").fetchone()
            alive[0].join(0.1)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * WRITERS
    stored = [len(reader.metrics(trial.id)) for one in reader.experiments() for trial in reader.trials(one.id)]
    every = 2 * WRITES
    assert sorted(stored) == ([every * WRITERS] if is_shared else [0, *[every] * WRITERS])
    assert long_reader.execute("SELECT count(*) FROM metrics").fetchone() == (0,), "it still sees its own moment"


@pytest.mark.usefixtures("on_a_file")
def test_waiting_for_others_takes_no_random_numbers_from_training(
    database: pathlib.Path, writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    with closing(sqlite3.connect(database, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        before = random.getstate()
        release = threading.Timer(0.1, other.execute, ["COMMIT"])
        release.start()
        writer.write([report(1, loss=1.0)])
        release.join()
    assert random.getstate() == before
    assert len(reader.metrics(1)) == 1


@pytest.mark.usefixtures("on_a_file")
def test_log_that_grew_while_somebody_read_shrinks_afterwards(
    database: pathlib.Path,
    writer: tracking.TrialWriter,
    long_reader: sqlite3.Connection,
    reader: tracking.TrackingReader,
) -> None:
    log = pathlib.Path(f"{database}-wal")
    step = 0
    while log.stat().st_size < 8 * MEGABYTE:
        writer.write([report(step, note="x" * 500_000)])
        step += 1
    assert len(reader.metrics(1)) == step
    long_reader.execute("COMMIT")
    for later in range(step, step + 3):
        writer.write([report(later, loss=1.0)])
    assert log.stat().st_size <= 4 * MEGABYTE
    assert [one.steps_completed for one in reader.metrics(1)] == list(range(step + 3))


def test_log_is_gone_after_the_last_writer(
    database: pathlib.Path, writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    writer.write([report(1, loss=1.0)])
    writer.close()
    assert not pathlib.Path(f"{database}-wal").exists()
    assert len(reader.metrics(1)) == 1


@pytest.mark.usefixtures("on_a_file")
def test_second_run_of_a_process_does_not_take_the_locks_of_the_first(
    database: pathlib.Path, writer: tracking.TrialWriter, describe_run: Callable[..., Any]
) -> None:
    writer.write([report(1, loss=1.0)])
    with tracking.TrialWriter.start(database, describe_run()):
        tracking.TrackingReader(database).experiments()
    # Whoever closes a database that nobody else has locked removes its log, under those who write to it.
    program = f"import sqlite3; c = sqlite3.connect({str(database)!r}); c.execute('SELECT * FROM trials'); c.close()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert pathlib.Path(f"{database}-wal").exists()
