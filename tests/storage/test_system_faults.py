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

import forking
from determined import storage
from determined.pytorch import Batch
from trials import LineTrial, assert_same, fit, records, saved_at, state_in


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
    return {**os.environ, "PYTHONPATH": forking.PYTHONPATH, **more}


def test_two_processes_can_resume_one_checkpoint_at_once() -> None:
    fit(max_length=Batch(2))
    (first,) = (one.uuid for one in records().checkpoints())
    programs = [forking.start(["-c", PROGRAM, "6", first], env=environment(), stdin=forking.PIPE) for _ in range(2)]
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
    forking.run(["-c", PROGRAM, "4", "latest"], env=past, check=True)
    assert fit(init=init, max_length=Batch(5), latest_checkpoint="latest").seen == [(0, 4)]


SAVE = """
import pathlib, sys
from determined import errors, storage
store = storage.FolderStore(pathlib.Path(sys.argv[1]))

def save(name):
    try:
        with store.create(name) as folder, storage.errors_naming(folder):
            (folder / "sub").mkdir()
            (folder / "sub" / "file").write_bytes(bytes(30_000))
    except errors.StorageException as error:
        print("not saved:", error)
    else:
        print("saved")

"""


@pytest.fixture
def store(tmp_path: pathlib.Path) -> storage.FolderStore:
    """A store with one checkpoint."""
    store = storage.FolderStore(tmp_path / "store")
    with store.create("before") as folder:
        (folder / "file").write_text("before")
    return store


def save_with(store: storage.FolderStore, program: str, *tracer: str) -> str:
    """Run a program that can `save`, and return what it printed."""
    command = [*tracer, sys.executable, "-c", SAVE + program, str(store.root)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if tracer and ("PTRACE" in done.stderr or "not permitted" in done.stderr):
        pytest.skip(f"strace cannot run here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def injecting(path: pathlib.Path, call: str, error: str) -> list[str]:
    """Return the command that makes a system call on a path fail in another command."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    failing = ["-P", os.path.normpath(path), "-e", f"inject={call}:error={error}"]
    return [strace, "-f", "-qq", "-o", os.devnull, *failing]


def assert_only_the_first_is_there(store: storage.FolderStore) -> None:
    assert store.list() == ["before"]
    store.open("before").verify()
    assert [path.name for path in store.root.iterdir()] == ["before"]


@pytest.mark.parametrize("place", ["after.partial/sub/file", "after.partial/manifest.json", "after.partial/sub", "."])
def test_checkpoint_whose_sync_fails_is_never_taken_for_saved(place: str, store: storage.FolderStore) -> None:
    said = save_with(store, "save('after')", *injecting(store.root / place, "fsync", "EIO"))
    assert "not saved:" in said
    assert "Input/output error" in said
    assert_only_the_first_is_there(store)


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ("mkdir", "after.partial"),
        ("openat", "after.partial"),
        ("openat", "after.partial/sub"),  # to list it
        ("openat", "after.partial/sub/file"),
        ("write", "after.partial/sub/file"),
        ("read", "after.partial/sub/file"),  # for its checksum
        ("chmod", "after.partial/sub/file"),
        ("rename", "after.partial"),
    ],
)
def test_kernel_without_memory_leaves_nothing_of_a_checkpoint(
    call: str, place: str, store: storage.FolderStore
) -> None:
    said = save_with(store, "save('after')", *injecting(store.root / place, call, "ENOMEM"))
    assert f"not saved: {store.root / 'after.partial'}" in said
    assert "cannot be written (Cannot allocate memory)" in said
    if call != "openat":  # by which its remains would have to be removed, too
        assert_only_the_first_is_there(store)
    assert store.list() == ["before"]


def test_file_that_grows_too_large_is_named(store: storage.FolderStore) -> None:
    said = save_with(store, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999)); save('after')")
    assert f"not saved: {store.root}/after.partial" in said
    assert "File too large" in said
    assert_only_the_first_is_there(store)


def test_process_without_file_descriptors_saves_whole_or_says_so(store: storage.FolderStore) -> None:
    program = """
import os, resource
save("warm-up")  # so that all modules are imported
free = len(os.listdir("/proc/self/fd")) - 1
for more in range(8):
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, 999))
    save(f"with-{more}")
resource.setrlimit(resource.RLIMIT_NOFILE, (999, 999))
save("after")
"""
    outcomes = save_with(store, program).splitlines()
    assert len(outcomes) == 10
    failed = [line for line in outcomes if line != "saved"]
    assert failed
    assert all("Too many open files" in line for line in failed), outcomes
    assert len(store.list()) == 1 + outcomes.count("saved")
    for uuid in store.list():
        store.open(uuid).verify()
    store.clear_leftovers()
    assert sorted(path.name for path in store.root.iterdir()) == store.list()
