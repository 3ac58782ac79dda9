"""Clocks that jump, processes that share a store, and a kernel that fails to sync."""

from __future__ import annotations

import glob
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import pytest

from determined import storage
from determined.pytorch import Batch
from trials import LineTrial, assert_same, fit, records, saved_at, state_in

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("days", [-1, 1])
def test_latest_is_the_one_saved_last_also_when_the_clock_jumps(days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    fit(max_length=Batch(2))
    for batches, jump in ((3, days), (4, -days), (5, 0)):
        monkeypatch.setattr(time, "time", lambda jump=jump: now() + jump * 86_400)
        resumed = fit(max_length=Batch(batches), latest_checkpoint="latest")
        assert resumed.seen == [(0, batches - 1)]


def test_clock_that_jumps_within_a_run_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time

    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            monkeypatch.setattr(time, "time", lambda: now() + 86_400 * (-1) ** batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)

    jumping = fit(Trial, max_length=Batch(4), checkpoint_period=Batch(1), reporting_period=Batch(1))
    assert saved_at() == [1, 2, 3, 4]
    assert [report.steps_completed for report in records().metrics(1, "training")] == [1, 2, 3, 4]
    monkeypatch.setattr(time, "time", now)
    assert_same(jumping.model.state_dict(), fit(max_length=Batch(4)).model.state_dict())


# Other processes, and a kernel that fails

PROGRAM = """
import sys
from determined.pytorch import Batch
from trials import fit
sys.stdin.read()  # until all can begin at once
init = {"exp_conf": {"name": "shared"}}
fit(init=init, max_length=Batch(int(sys.argv[1])), checkpoint_period=Batch(2), latest_checkpoint=sys.argv[2])
"""


def environment(**more: str) -> dict[str, str]:
    source = str(pathlib.Path(storage.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(TESTS)]), **more}


def test_two_processes_can_resume_one_checkpoint_at_once() -> None:
    fit(max_length=Batch(2))
    (first,) = (one.uuid for one in records().checkpoints())
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "6", first], env=environment(), stdin=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for program in programs:
        assert program.stdin is not None
        program.stdin.close()
    assert [program.wait(120) for program in programs] == [0, 0]
    ends = [one for one in records().checkpoints() if one.steps_completed == 6]
    assert len({one.trial_id for one in ends}) == 2
    one, other = (state_in(pathlib.Path(end.path)) for end in ends)
    assert_same(one, other)


def test_latest_ignores_a_clock_that_stands_in_the_past() -> None:
    libraries = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    if not libraries:
        pytest.skip("libfaketime is not installed")
    init = {"exp_conf": {"name": "shared"}}
    fit(init=init, max_length=Batch(2))
    past = environment(LD_PRELOAD=libraries[0], FAKETIME="-1d")
    subprocess.run([sys.executable, "-c", PROGRAM, "4", "latest"], env=past, stdin=subprocess.DEVNULL, check=True)
    assert fit(init=init, max_length=Batch(5), latest_checkpoint="latest").seen == [(0, 4)]


@pytest.mark.parametrize("place", ["after.partial/sub/file", "after.partial/manifest.json", "after.partial/sub", "."])
def test_checkpoint_whose_sync_fails_is_never_taken_for_saved(place: str, tmp_path: pathlib.Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    store = storage.FolderStore(tmp_path / "store")
    with store.create("before") as folder:
        (folder / "file").write_text("before")
    program = f"""
from determined import errors, storage
store = storage.FolderStore(__import__("pathlib").Path({str(store.root)!r}))
try:
    with store.create("after") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("after")
except errors.StorageException as error:
    print("not saved:", error)
else:
    print("saved")
"""
    failing = ["-P", os.path.normpath(store.root / place), "-e", "inject=fsync:error=EIO"]
    command = [strace, "-f", "-qq", "-o", os.devnull, *failing, sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if "PTRACE" in done.stderr or "not permitted" in done.stderr:
        pytest.skip(f"strace cannot run here: {done.stderr.strip()}")
    assert "not saved:" in done.stdout, done.stderr
    assert "Input/output error" in done.stdout
    assert store.ids() == ["before"]
    assert store.verified("before")
    assert [path.name for path in store.root.iterdir()] == ["before"]
