"""Cut the power of a disk again and again while checkpoints and metrics are stored, and look for what is lost.

The disk is an ext4 file system in a file, which the kernel is told to shut down without writing out anything more. A
sync that is under way at that instant may be said to have succeeded although it has not (seen with Linux 6.18), which
nobody would hear without power: what counts is what was said before.
`python tests/torture/power.py --cuts 100` prints the counts; its status is 1 if anything is lost that was said to be
saved, and 77 where there can be no such disk.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import logging
import multiprocessing
import os
import pathlib
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import findings

from determined import core, errors, storage, tracking

SHUT_DOWN, WITHOUT_FLUSH = 0x8004587D, 2
"""The ioctl of ext4 that stops all writing to its disk, and its flag to leave the journal as it is too."""

CANNOT = 77
LONGEST = 0.25
"""Seconds within which the power goes at a random instant."""

Tell = Callable[[str, Any], None]


class Disk:
    """An ext4 file system in a file, mounted at a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._image, self.at = folder / "image", folder / "disk"
        self.at.mkdir()
        with self._image.open("wb") as file:
            file.truncate(64 << 20)
        _run("mkfs.ext4", "-q", "-F", str(self._image))

    @contextlib.contextmanager
    def mounted(self) -> Iterator[pathlib.Path]:
        _run("mount", "-o", "loop", str(self._image), str(self.at))
        try:
            yield self.at
        finally:
            _run("umount", str(self.at))

    def cut(self) -> None:
        """Be without power from now on: what is not on the disk yet will never be."""
        descriptor = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, SHUT_DOWN, struct.pack("I", WITHOUT_FLUSH))
        finally:
            os.close(descriptor)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


# What is interrupted


def fill(folder: pathlib.Path, number: int) -> None:
    (folder / "code").mkdir()
    (folder / "code" / "model.py").write_text(f"answer = {number}\n")
    (folder / "weights").write_bytes(random.Random(number).randbytes(20_000))


def store_only(home: pathlib.Path, tell: Tell) -> None:
    """Save checkpoints without a record, whose own syncs would serve those of the checkpoints too."""
    store = findings.store_of(home)
    for number in range(10**6):
        with store.create(f"checkpoint-{number}") as folder:
            fill(folder, number)
        tell("checkpoint", f"checkpoint-{number}")


def recorded_run(home: pathlib.Path, tell: Tell) -> None:
    """Save checkpoints and report metrics as a run does."""
    os.environ["DET_HOME"] = str(home)
    with core.init() as context:
        context.recorder.confirm()  # experiment 1, trial 1 of a new home
        recorder = tracking.TrialWriter.attach(home / "tracking.db", 1, 1)
        for number in range(1, 10**6):
            recorder.write([tracking.MetricReport(group="own", steps_completed=number, metrics={}, time=0.0)])
            tell("metric", ["own", number])
            context.train.report_training_metrics(number, {"loss": 1 / number})
            with context.checkpoint.store_path({"steps_completed": number}) as (folder, uuid):
                fill(folder, number)
            tell("metric", ["training", number])
            tell("recorded checkpoint", uuid)


KINDS = {"store": store_only, "run": recorded_run}


def write(kind: str, home: pathlib.Path, pipe: Any, disk: Disk, most: int | None) -> None:
    """Store things until the power goes; by our own hand right after so many that were told of."""
    logging.disable()  # of a disk that is gone
    told = 0

    def tell(what: str, which: Any) -> None:
        nonlocal told
        if told == most:
            return
        pipe.send((what, which))
        told += 1
        if told == most:
            disk.cut()

    try:
        KINDS[kind](home, tell)
    except (OSError, errors.DeterminedException):
        os._exit(0)  # as without power nothing can be put in order
    except BaseException:
        traceback.print_exc()
        os._exit(1)


# What is left


@dataclasses.dataclass
class Counts:
    """What was acknowledged, and what of that is missing or damaged."""

    told: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def check(self, home: pathlib.Path, told: list[tuple[str, Any]]) -> None:
        """Compare what the disk holds with what was acknowledged."""
        self.told.update(what for what, _ in told)
        store = findings.store_of(home)
        for what, which in told:
            if "checkpoint" in what and not _is_intact(store, which):
                self.faults["checkpoints lost"] += 1
        self.faults["unreadable checkpoints"] += sum(not _is_intact(store, uuid) for uuid in store.list())
        if (home / "tracking.db").exists():
            self.faults["damaged databases"] += _integrity(home / "tracking.db") != "ok"
            stored, recorded = _on_record(home)
            self.faults["metrics lost"] += sum(what == "metric" and tuple(which) not in stored for what, which in told)
            self.faults["records lost"] += sum(
                what == "recorded checkpoint" and which not in recorded for what, which in told
            )
        elif any(what != "checkpoint" for what, _ in told):
            self.faults["databases lost"] += 1
        store.clear_leftovers()
        self.faults["leftover folders"] += len(findings.leftovers(home))


def _is_intact(store: storage.FolderStore, uuid: str) -> bool:
    try:
        store.open(uuid).verify()
    except errors.InvalidCheckpointException as error:
        print(f"  {error}", flush=True)
        return False
    return True


def _integrity(database: pathlib.Path) -> str:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])


def _on_record(home: pathlib.Path) -> tuple[set[tuple[str, int]], set[str]]:
    """Return the reports by group and step, and the ids of the checkpoints, as anybody reads them."""
    return {(group, step) for group, step, _ in findings.rows(home)}, {one.uuid for one in findings.checkpoints(home)}


def cut_once(disk: Disk, rng: random.Random, number: int, counts: Counts) -> None:
    """Store things until the power goes, and check what is left when it is back."""
    kind, name, told = list(KINDS)[number % 2], f"home-{number}", []
    most = rng.randint(3, 8) if number % 4 < 2 else None
    with disk.mounted() as at:
        mine, its = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        writer = context.Process(target=write, args=(kind, at / name, its, disk, most))
        writer.start()
        its.close()
        with contextlib.suppress(EOFError):
            if most is None:
                time.sleep(rng.uniform(0, LONGEST))  # the instant is what is tried
                while mine.poll():
                    told.append(mine.recv())
                disk.cut()
                mine.close()  # nothing that is said from now on counts
            else:
                while True:
                    told.append(mine.recv())
        writer.join()
        assert writer.exitcode == 0, "the writer did not end for want of power"
    with disk.mounted() as at:
        counts.check(at / name, told)
        shutil.rmtree(at / name, ignore_errors=True)


def cut_often(cuts: int, seed: int) -> int:
    """Cut the power so many times and print the counts."""
    counts, rng = Counts(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="power-") as folder:
        try:
            disk = Disk(pathlib.Path(folder))
            with disk.mounted():
                pass
        except OSError as error:
            print(f"The power cuts are left out: {error}.")
            return CANNOT
        for number in range(cuts):
            cut_once(disk, rng, number, counts)
    told = ", ".join(f"{count} {what}s" for what, count in sorted(counts.told.items()))
    print(f"{cuts} power cuts (seed {seed}) after {told}")
    names = ("checkpoints lost", "records lost", "metrics lost", "databases lost", "damaged databases")
    names += ("unreadable checkpoints", "leftover folders")
    print(", ".join(f"{counts.faults[name]} {name}" for name in names))
    return 1 if counts.faults.total() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="to repeat a run")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return cut_often(given.cuts, given.seed)
    # With mounts of its own, which are gone with the process however it ends, and their loop devices with them.
    alone = ["unshare", "--mount", "--propagation", "private"]
    tried = subprocess.run([*alone, "true"], capture_output=True, text=True) if shutil.which("unshare") else None
    if tried is None or tried.returncode:
        print(f"The power cuts are left out: {tried.stderr.strip() if tried else 'unshare is not installed'}.")
        return CANNOT
    options = [f"--cuts={given.cuts}", f"--seed={given.seed}", "--inside"]
    return subprocess.run([*alone, sys.executable, __file__, *options]).returncode


if __name__ == "__main__":
    sys.exit(main())
