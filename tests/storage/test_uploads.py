"""Uploads that are interrupted, refused or killed, and what is on this machine meanwhile."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import logging
import os
import pathlib
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import fsspec
import pytest

from determined import errors, storage
from determined._home import home
from determined.storage._fsspec import uploads
from determined.storage._fsspec.objects import Objects
from object_servers import S3Server

RunProgram = Callable[..., subprocess.CompletedProcess[str]]
FILES = {"a": 100, "b/c": 200, "metadata.json": 2}


class Interrupted:
    """A file system in memory whose n-th call fails, before or after it has had its effect."""

    def __init__(self, failing: int, has_effect: bool) -> None:
        self._files = fsspec.filesystem("memory")
        self._failing = failing
        self._has_effect = has_effect
        self._lock = threading.Lock()
        self.calls = 0
        self.sent: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if name not in ("put_file", "pipe_file", "cat_file", "find", "rm_file"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                self.calls += 1
                fails = self.calls == self._failing
            if not fails or self._has_effect:
                result = found(*args, **options)
                if name == "put_file":
                    self.sent.append(args[1])
            if fails:
                raise OSError("the connection was cut")
            return result

        return call


def fill(store: storage.CheckpointStore, uuid: str = "one", files: dict[str, int] = FILES) -> None:
    with store.create(uuid) as folder:
        for name, size in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(os.urandom(size))


def names_in(root: str) -> list[str]:
    return sorted(str(name).removeprefix(f"/{root}/") for name in fsspec.filesystem("memory").find(root))


@pytest.mark.parametrize("has_effect", [False, True])
def test_upload_that_fails_at_any_call_is_completed(has_effect: bool, tmp_path: pathlib.Path) -> None:
    for failing in itertools.count(1):
        root = f"interrupted/{has_effect}-{failing}-{tmp_path.name}"
        files = Interrupted(failing, has_effect)
        store = storage.FsspecStore(Objects(f"memory://{root}", root, lambda files=files: files))
        fill(store)
        store.wait()
        assert names_in(root) == ["one/a", "one/b/c", "one/manifest.json", "one/metadata.json"]
        assert sorted(files.sent) == sorted(f"{root}/one/{name}" for name in FILES), "a file was sent twice"
        store.copies.remove("one")
        if files.calls < failing:
            return
        with storage.store_for(f"memory://{root}", tmp_path).open("one") as saved:
            saved.verify()
            _ = saved.folder


def test_outage_is_said_once_and_its_end_too(s3: S3Server, s3_url: str, caplog: pytest.LogCaptureFixture) -> None:
    store = storage.store_for(s3_url, home().checkpoints)
    store.begin()
    s3.stop()
    with caplog.at_level(logging.WARNING, "determined.storage"):
        for uuid in ("one", "two"):  # neither fails nor waits
            fill(store, uuid)
        while not caplog.messages:
            threading.Event().wait(0.01)
        for uuid in ("one", "two"):
            with store.open(uuid) as saved:
                saved.verify()
        s3.start()
        store.wait()
    assert store.list() == ["one", "two"]
    said = [line for line in caplog.messages if not line.startswith("Waiting")]
    assert len(said) == 2
    assert f"cannot be uploaded to {s3_url} now: Could not connect" in said[0]
    assert "upload is repeated until it succeeds" in said[0]
    assert "work again" in said[1]


def test_refusals_of_the_server_are_survived(s3: S3Server, s3_url: str) -> None:
    store = storage.store_for(s3_url, home().checkpoints)
    store.begin()
    left = [503, 500, 503, 429]
    s3.refuse = lambda method, path: left.pop() if left and method == "PUT" else None
    fill(store)
    store.wait()
    assert left == []
    store.copies.remove("one")
    with store.open("one") as saved:
        assert {name: (saved.folder / name).stat().st_size for name in FILES} == FILES


@pytest.mark.parametrize("status", [503, 403])
def test_end_of_a_run_does_not_wait_for_ever(
    s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    for name in ("MAX_OUTAGE_S", "MAX_REFUSAL_S"):
        monkeypatch.setattr(uploads, name, 0.1)
    store = storage.store_for(s3_url, home().checkpoints)
    store.begin()
    s3.refuse = lambda method, path: status
    fill(store)
    with pytest.raises(errors.StorageException, match=r"not in s3://.* yet: 1\..*safe in the home folder.*`det gc`"):
        store.wait()
    s3.refuse = lambda method, path: None
    monkeypatch.undo()
    store.wait()
    assert store.list() == ["one"]


UPLOAD = """
import os, pathlib
from determined import storage
store = storage.store_for(os.environ["STORE"], pathlib.Path())
store.begin()
with store.create("one") as folder:
    (folder / "a").write_bytes(b"a" * 100)
    (folder / "big").write_bytes(b"b" * 40_000_000)
store.wait()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("point", "left_to_send"),
    [
        pytest.param("upload_began", 2, marks=pytest.mark.thorough),
        ("files_uploaded", 0),
        pytest.param("uploaded", 0, marks=pytest.mark.thorough),
    ],
)
def test_next_process_goes_on_after_a_kill(
    s3: S3Server, s3_url: str, run_program: RunProgram, point: str, left_to_send: int
) -> None:
    assert run_program(UPLOAD, STORE=s3_url, DET_DIE_AT=point).returncode == -9
    store = storage.store_for(s3_url, home().checkpoints)
    assert store.list() == (["one"] if point == "uploaded" else [])
    assert store.clear_leftovers() == []  # what this machine is to upload stays
    s3.requests.clear()
    store.begin()
    store.wait()
    names = {line.rpartition("/")[2] for line in s3.requests if line.startswith(("PUT", "POST"))}
    assert len(names & {"a", "big"}) == left_to_send
    assert store.list() == ["one"]
    store.objects.abort_parts()
    with store.open("one") as saved:
        saved.verify()
    assert s3.client().list_multipart_uploads(Bucket=s3_url[5:].partition("/")[0]).get("Uploads", []) == []


@pytest.mark.process
@pytest.mark.thorough
def test_upload_killed_in_the_middle_of_a_file_is_repeated(s3: S3Server, s3_url: str, tmp_path: pathlib.Path) -> None:
    import forking

    sent = threading.Event()

    def refuse(method: str, path: str) -> int | None:
        if method == "PUT" and path.endswith("/big"):
            sent.set()
            threading.Event().wait(0.5)
        return None

    s3.refuse = refuse
    env = {**os.environ, "PYTHONPATH": forking.PYTHONPATH, "STORE": s3_url}
    with forking.start(["-c", UPLOAD], env=env, cwd=tmp_path) as process:
        assert sent.wait(60)
        process.kill()
    s3.refuse = lambda method, path: None
    store = storage.store_for(s3_url, home().checkpoints)
    assert store.list() == []
    store.begin()
    store.wait()
    store.copies.remove("one")
    with store.open("one") as saved:
        assert (saved.folder / "big").stat().st_size == 40_000_000
    assert s3.client().list_multipart_uploads(Bucket=s3_url[5:].partition("/")[0]).get("Uploads", []) == []


MEMORY = """
import os, pathlib, resource
from determined import storage
store = storage.store_for(os.environ["STORE"], pathlib.Path())
store.begin()
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with store.create("one") as folder, (folder / "big").open("wb") as file:
    for _ in range(2048):
        file.write(os.urandom(1 << 20))
store.wait()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)
"""


@pytest.mark.process
@pytest.mark.campaign
def test_large_checkpoint_goes_up_in_little_memory(
    s3: S3Server, s3_url: str, run_in_new_interpreter: RunProgram
) -> None:
    done = run_in_new_interpreter(MEMORY, STORE=s3_url)
    assert int(done.stdout) < 300 << 10, done.stderr


def test_interrupted_deletion_leaves_no_half_checkpoint(tmp_path: pathlib.Path) -> None:
    for failing in itertools.count(1):
        root = f"deleted/{failing}-{tmp_path.name}"
        plain = storage.store_for(f"memory://{root}", tmp_path)
        fill(plain)
        plain.wait()
        files = Interrupted(failing, has_effect=False)
        store = storage.FsspecStore(Objects(f"memory://{root}", root, lambda files=files: files))
        with contextlib.suppress(errors.StorageException):
            store.delete("one")
        if files.calls < failing:
            assert names_in(root) == []
            return
        if plain.list():
            with plain.open("one") as saved:
                saved.verify()
        else:
            plain.clear_leftovers()
            assert names_in(root) == []


def test_leftovers_of_other_machines_are_removed_after_a_day(tmp_path: pathlib.Path) -> None:
    root = f"leftovers/{tmp_path.name}"
    store = storage.store_for(f"memory://{root}", tmp_path)
    files = fsspec.filesystem("memory")
    for name in ("young/.resolute-upload", "young/a", "old/.resolute-upload", "old/a", "foreign/a"):
        files.pipe_file(f"{root}/{name}", b"")
    for name in ("young/.resolute-upload", "old/.resolute-upload", "old/a", "foreign/a"):
        long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=25)
        files.store[f"/{root}/{name}"].created = long_ago
    assert store.clear_leftovers() == ["old"]
    assert names_in(root) == ["foreign/a", "young/.resolute-upload", "young/a"]


@pytest.mark.parametrize("break_it", ["bucket", "server", "keys"])
def test_store_that_cannot_be_used_is_refused_with_the_remedy(s3: S3Server, bucket: str, break_it: str) -> None:
    section = {"type": "s3", "bucket": bucket, "endpoint_url": s3.url}
    match break_it:
        case "bucket":
            section["bucket"], expected = "no-such-bucket", "Create 'no-such-bucket', or write the name of one that"
        case "server":
            section["endpoint_url"], expected = "http://127.0.0.1:9", "Check that the store can be reached"
        case "keys":
            section |= {"access_key": "AKIAWRONGWRONGWRONG0", "secret_key": "hush-hush"}
            expected = r"access is refused .*Check access_key and secret_key in checkpoint_storage"
            s3.post("/moto-api/reset-auth", "0")
    try:
        with pytest.raises(errors.StorageException, match=expected) as caught:
            storage.store_for(section, home().checkpoints).begin()
    finally:
        s3.post("/moto-api/reset-auth", "Infinity")
    assert "WRONG" not in str(caught.value)
    assert "hush" not in str(caught.value)
    assert not home().storage_credentials.exists()


def test_keys_of_a_config_are_kept_for_the_owner_alone(s3: S3Server, bucket: str) -> None:
    keys = {"access_key": "tests", "secret_key": "tests-secret"}
    store = storage.store_for({"type": "s3", "bucket": bucket, "endpoint_url": s3.url, **keys}, home().checkpoints)
    store.begin()
    assert home().storage_credentials.stat().st_mode & 0o777 == 0o600
    assert json.loads(home().storage_credentials.read_text()) == {store.location: keys}
    (value,) = storage.environment_for(store.location).values()
    assert json.loads(value) == {store.location: keys}


def test_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "adlfs" else find(name))
    with pytest.raises(errors.StorageException, match=r"needs the package adlfs.*'resolute\[azure\]'"):
        storage.store_for("az://c", tmp_path)


# What this machine has of the store


DOWNLOAD = """
import os, pathlib
from determined import storage
with storage.store_for(os.environ["STORE"], pathlib.Path()).open("one") as saved:
    print((saved.folder / "a").stat().st_size)
"""


@pytest.mark.process
def test_processes_of_a_machine_share_a_download(s3: S3Server, s3_url: str, run_program: RunProgram) -> None:
    store = storage.store_for(s3_url, home().checkpoints)
    fill(store)
    store.wait()
    store.copies.remove("one")
    s3.requests.clear()
    threads = [threading.Thread(target=lambda: done.append(run_program(DOWNLOAD, STORE=s3_url))) for _ in range(3)]
    done: list[subprocess.CompletedProcess[str]] = []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.stdout for one in done] == ["100\n"] * 3
    assert len([line for line in s3.requests if line.startswith("GET") and line.endswith("/one/a")]) == 1


def test_damaged_copy_is_fetched_again(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    store = storage.store_for(f"memory://damaged/{tmp_path.name}", tmp_path)
    fill(store)
    store.wait()
    good = (store.copies.path("one") / "a").read_bytes()
    (store.copies.path("one") / "a").write_bytes(b"x" * 100)
    with store.open("one") as saved:
        assert (saved.folder / "a").read_bytes() == good
    assert "is damaged and is fetched again" in caplog.text


def test_copies_are_bounded_and_those_in_use_stay(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = storage.store_for(f"memory://bounded/{tmp_path.name}", tmp_path)
    for uuid in ("a", "b", "c"):
        fill(store, uuid, {"file": 10_000})
    store.wait()
    monkeypatch.setenv("DET_CHECKPOINT_CACHE_GB", "0")
    with store.open("b") as used:
        folder = used.folder
        with store.open("a") as other:
            _ = other.folder
        assert [uuid for uuid in ("a", "b", "c") if store.copies.has(uuid)] == ["b"]
        assert (folder / "file").stat().st_size == 10_000
    assert not store.copies.has("b")
    with store.open("c") as saved:
        assert (saved.folder / "file").stat().st_size == 10_000


def test_checkpoints_to_upload_are_not_evicted(
    s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("DET_CHECKPOINT_CACHE_GB", "0")
    store = storage.store_for(s3_url, tmp_path)
    store.begin()
    s3.stop()
    fill(store)
    with store.open("one"):
        pass
    assert store.copies.has("one")
    s3.start()
    store.wait()
    assert store.list() == ["one"]
