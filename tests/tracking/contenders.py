"""Processes that do something to one database at the same time, and how to start them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import driving

import forking
from determined import errors, tracking
from determined.tracking import Changeset

WRITES = 40
AT_ONCE = 30


@contextlib.contextmanager
def started(count: int, task: str, *arguments: Any) -> Iterator[list[forking.Process]]:
    """Give processes that are ready for a task, each told its number, and end them afterwards."""
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(count):
            command = [__file__, task, json.dumps([number, *map(str, arguments)])]
            environment = {**os.environ, "PYTHONPATH": forking.PYTHONPATH}
            process = forking.start(command, stdin=forking.PIPE, stdout=forking.PIPE, env=environment)
            stack.push(process)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield processes


def go(processes: list[forking.Process]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def answers(processes: list[forking.Process]) -> list[Any]:
    """Wait for what the processes answer; none ends before the last one has."""
    found = [json.loads(process.stdout.readline() or "null") for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    return found


def in_processes(count: int, task: str, *arguments: Any) -> list[Any]:
    with started(count, task, *arguments) as processes:
        go(processes)
        return answers(processes)


def claim(number: int, database: str) -> tuple[int, str]:
    """Try to run the experiment; returns why it cannot."""
    with tracking.ExperimentStore.open(database, 1) as store:
        try:
            store.claim()
        except errors.TrackingException as error:
            return os.getpid(), str(error)
    return os.getpid(), ""


def take(number: int, database: str) -> list[int] | None:
    """Take two slots of seven and give them back, again and again; returns those that are kept at last."""
    with tracking.Slots(database) as slots:
        for _ in range(10):
            slots.take(1, number, 2, 7)
            slots.release(number)
        return slots.take(1, number, 2, 7)


def append(number: int, database: str) -> list[int]:
    """Take over and store events until another one takes over; returns the numbers of those that are stored."""
    stored: list[int] = []
    with tracking.ExperimentStore.open(database, 1) as store:
        store.claim(force=True)
        with contextlib.suppress(errors.TrackingException):
            while len(stored) < 30:
                last = len(store.events())
                store.commit(Changeset(events=[driving.event(last + 1, f"of {number}")]))
                stored.append(last + 1)
    return stored


def train(number: int, database: str) -> int:
    """Report like a busy trial; returns how many reports are acknowledged."""
    with tracking.TrialWriter.attach(database, 1, number + 1, 1) as writer:
        for write in range(WRITES):
            steps = range(write * AT_ONCE, (write + 1) * AT_ONCE)
            writer.write([driving.report(step, "training", loss=0.5) for step in steps])
            messages = [driving.report(steps[-1], loss=float(write)), tracking.ProgressChanged(progress=write / WRITES)]
            writer.write(messages)
            writer.best_validation("loss", smaller_is_better=True)
    return WRITES * (AT_ONCE + 1)


def run(number: int, database: str, trials: str) -> int:
    """Answer every validation by an event, as a runner does; returns how often it looked."""
    looks = seen = 0
    with tracking.ExperimentStore.open(database, 1) as store:
        store.claim()
        while seen < int(trials) * WRITES:
            time.sleep(0.01)
            if store.changed():
                looks += 1
                new = store.validations(after_id=seen)
                events = [driving.event(one.id, trial=one.trial_id, step=one.steps_completed) for one in new]
                change = tracking.ExperimentChange(progress=seen / (int(trials) * WRITES))
                store.commit(Changeset(events=events, experiment_change=change))
                store.control()
                seen += len(new)
    return looks


def watch(number: int, database: str, trials: str) -> int:
    """Read like a page until all is there; returns how often it read."""
    reader, reads = tracking.TrackingReader(database), 0
    while any(len(reader.metrics(id + 1, "validation")) < WRITES for id in range(int(trials))):
        reader.experiments()
        reads += 1
    return reads


if __name__ == "__main__":
    tasks = {"claim": claim, "take": take, "append": append, "train": train, "run": run, "watch": watch}
    given = json.loads(sys.argv[2])
    assert "://" in given[1] or pathlib.Path(given[1]).exists()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(tasks[sys.argv[1]](*given)), flush=True)  # type: ignore[operator]
    sys.stdin.readline()
