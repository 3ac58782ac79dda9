"""core_context.checkpoint with several ranks: one checkpoint of all their files, one download for a machine."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from core_ranks import Rank, Ranks

from determined import tracking
from determined._home import home

PRELUDE = """
import contextlib, pathlib, time
def attempt(action):
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def store(checkpoints, files, metadata=None):
    with checkpoints.store_path(metadata, shard=True) as (folder, uuid):
        for name, contents in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(contents)
    return uuid
"""

OPENED = """
with core.init(distributed=context) as job:
    checkpoints = job.checkpoint
"""

Job = Callable[..., list[str]]


@pytest.fixture
def job(ranks: Ranks) -> Job:
    """Runs a program in several ranks, in which `checkpoints` is the service, and returns what each says last."""

    def run(program: str, size: int = 2, **options: Any) -> list[str]:
        body = "".join(f"    {line}\n" for line in program.strip("\n").splitlines())
        started = ranks.job(f"{PRELUDE}{OPENED}{body}", size, **options)
        return [last_line(rank) for rank in started]

    return run


def last_line(rank: Rank) -> str:
    line = rank.line()
    assert rank.process.wait(60) == 0, line
    return line


def files(uuid: str) -> dict[str, str]:
    folder = home().checkpoints / uuid
    names = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in names if path.name != "manifest.json"}


def nothing_is_left() -> bool:
    return not home().checkpoints.exists() or not any(home().checkpoints.iterdir())


def test_files_and_metadata_of_all_ranks_are_in_one_checkpoint(job: Job, records: tracking.TrackingReader) -> None:
    one, other = job(
        """
files = {f"weights-{rank}": str(rank), "same": "x", f"code/{rank}.py": ""}
say(store(checkpoints, files, {"steps_completed": 3, "of": {"all": {"format": "x"}, str(rank): {"rank": rank}}}))
"""
    )
    assert one == other
    found = files(one)
    metadata = json.loads(found.pop("metadata.json"))
    assert found == {"weights-0": "0", "weights-1": "1", "same": "x", "code/0.py": "", "code/1.py": ""}
    assert metadata == {"steps_completed": 3, "of": {"all": {"format": "x"}, "0": {"rank": 0}, "1": {"rank": 1}}}
    (record,) = records.checkpoints()
    assert (record.uuid, record.steps_completed, record.metadata) == (one, 3, metadata)
    assert record.resources.keys() == {*found, "metadata.json"}


def test_the_checkpoint_of_all_ranks_can_be_verified_and_restored(job: Job) -> None:
    said = job(
        """
uuid = store(checkpoints, {f"weights-{rank}": str(rank)})
with checkpoints.restore_path(uuid) as folder:
    say((folder / f"weights-{1 - rank}").read_text())
"""
    )
    assert said == ["1", "0"]


@pytest.mark.parametrize(
    ("files_of_rank", "message"),
    [
        ('{"a/weights": str(rank)}', "StorageException: 'a/weights' has other contents on rank 1 than on rank 0"),
        ('{"a": ""} if rank else {"a/b": ""}', "StorageException: 'a' of the checkpoint is a file on rank 1"),
    ],
)
def test_different_contents_for_one_name_are_refused_on_all_ranks(job: Job, files_of_rank: str, message: str) -> None:
    for said in job(f"say(attempt(lambda: store(checkpoints, {files_of_rank})))"):
        assert said.startswith(message)
    assert nothing_is_left()


def test_different_metadata_for_one_key_are_refused_on_all_ranks(job: Job) -> None:
    for said in job('say(attempt(lambda: store(checkpoints, {}, {"at": {"epoch": rank}})))'):
        assert said.startswith("MisuseError: The checkpoint metadata has at.epoch=0 on rank 0, but 1 on rank 1")
    assert nothing_is_left()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_on_one_rank_is_one_on_all(job: Job, failing: int) -> None:
    said = job(
        f"""
def fail():
    with checkpoints.store_path(shard=True) as (folder, uuid):
        (folder / "weights").write_text(str(rank))
        if rank == {failing}:
            raise LookupError("no weights")
say(attempt(fail))
"""
    )
    assert said[failing] == "LookupError: no weights"
    assert said[1 - failing].startswith("PeerLostException:")
    assert f"rank {failing} failed: LookupError: no weights" in said[1 - failing]
    assert nothing_is_left()


@pytest.mark.parametrize("metadata", ["{1: object()}", '{"steps_completed": -1}'])
def test_metadata_that_cannot_be_kept_on_one_rank_is_refused_on_all(job: Job, metadata: str) -> None:
    said = job(f"say(attempt(lambda: store(checkpoints, {{}}, {metadata} if rank == 1 else None)))")
    assert said[1].startswith("ValueError:")
    assert "rank 1 failed: ValueError" in said[0]
    assert nothing_is_left()


def test_ranks_go_on_after_a_checkpoint_that_failed(job: Job) -> None:
    one, other = job(
        """
attempt(lambda: store(checkpoints, {"weights": str(rank)}))
say(store(checkpoints, {f"weights-{rank}": ""}))
"""
    )
    assert one == other
    assert [path.name for path in home().checkpoints.iterdir()] == [one]


def test_a_rank_that_dies_takes_the_checkpoint_with_it(ranks: Ranks) -> None:
    program = """
try:
    with core.init(distributed=context) as job, job.checkpoint.store_path(shard=True) as (folder, uuid):
        if rank == 1:
            os._exit(9)
except BaseException as error:
    say(type(error).__name__)
"""
    chief, other = ranks.job(program, 2)
    assert chief.line()
    assert other.process.wait(60) == 9
    chief.process.wait(60)
    assert nothing_is_left()


def test_only_the_chief_may_store_without_shards(job: Job) -> None:
    said = job(
        """
def alone():
    with checkpoints.store_path() as (folder, uuid):
        (folder / "weights").touch()
    return "stored"
said = attempt(alone)
context.allgather(None)
say(said)
"""
    )
    assert said[0] == "stored"
    assert said[1].startswith("WrongRankError: store_path() or upload() was called on rank 1")
    assert "shard=True" in said[1]


def test_a_rank_that_cannot_see_the_folder_is_told_the_remedy(job: Job, tmp_path: pathlib.Path) -> None:
    said = job(
        """
import unittest.mock
# As on a machine where the folder of the chief is another, empty one.
hidden = unittest.mock.patch.object(pathlib.Path, "is_dir", lambda path: False) if rank else contextlib.nullcontext()
with hidden:
    said = attempt(lambda: store(checkpoints, {}))
say(said)
"""
    )
    assert said[1].startswith("StorageException: Rank 1 does not see ")
    for one in said:
        assert str(home().checkpoints) in one
        assert "Set checkpoint_storage to a folder that all machines share" in one
    assert nothing_is_left()


def test_uploads_of_all_ranks_are_one_checkpoint(job: Job, tmp_path: pathlib.Path) -> None:
    for rank in range(2):
        (tmp_path / f"of-{rank}").mkdir()
        (tmp_path / f"of-{rank}" / f"weights-{rank}").write_text(str(rank))
        (tmp_path / f"of-{rank}" / "log").write_text(str(rank))
    one, other = job(
        f"""
folder = pathlib.Path({str(tmp_path)!r}, f"of-{{rank}}")
say(checkpoints.upload(folder, shard=True, selector=lambda name: name != "log"))
"""
    )
    assert one == other
    assert files(one).keys() == {"weights-0", "weights-1", "metadata.json"}


def test_a_missing_folder_of_one_rank_fails_the_upload_on_all(job: Job, tmp_path: pathlib.Path) -> None:
    said = job(
        f"say(attempt(lambda: checkpoints.upload({str(tmp_path)!r} if rank == 0 else 'nowhere', shard=True)))",
    )
    assert said[1].startswith("StorageException: upload('nowhere'): there is no such folder")
    assert "rank 1 failed: StorageException: upload('nowhere')" in said[0]
    assert nothing_is_left()


SAVED = """
uuid = store(checkpoints, {f"weights-{rank}": str(rank)})
"""


def test_ranks_of_a_machine_share_the_chosen_files_until_all_are_done(job: Job) -> None:
    said = job(
        SAVED
        + """
with checkpoints.restore_path(uuid, selector=lambda name: name == "weights-1") as folder:
    places = context.allgather(str(folder))
    if rank == 1:
        time.sleep(0.2)  # in which the first rank, whose block is over, must not take the folder away
    names = sorted(path.name for path in folder.iterdir())
context.allgather(None)
say(len(set(places)), names, folder.exists())
"""
    )
    assert said == ["1 ['weights-1'] False"] * 2


def test_each_rank_can_have_its_own_folder(job: Job) -> None:
    said = job(
        SAVED
        + """
mode = core.DownloadMode.NoSharedDownload
with checkpoints.restore_path(uuid, mode, selector=lambda name: True) as folder:
    say(len(set(context.allgather(str(folder)))))
"""
    )
    assert said == ["2", "2"]


def test_damage_that_the_first_rank_finds_is_told_on_all(job: Job) -> None:
    said = job(
        SAVED
        + """
if rank == 0:
    (checkpoints.store.path(uuid) / "weights-1").write_text("?")
def read():
    with checkpoints.restore_path(uuid):
        pass
say(attempt(read))
"""
    )
    for one in said:
        assert one.startswith("InvalidCheckpointException:")
        assert "weights-1 is damaged" in one


def test_an_exception_while_reading_does_not_keep_the_others(job: Job) -> None:
    said = job(
        SAVED
        + """
def read():
    with checkpoints.restore_path(uuid, selector=lambda name: True) as folder:
        if rank == 1:
            raise LookupError("not here")
        return (folder / "weights-0").read_text()
say(attempt(read))
"""
    )
    assert said == ["0", "LookupError: not here"]


def test_a_download_is_shared_by_the_ranks_of_a_machine(job: Job, tmp_path: pathlib.Path) -> None:
    said = job(
        SAVED
        + f"""
target = pathlib.Path({str(tmp_path / "copy")!r})
checkpoints.download(uuid, target)
say(sorted(path.name for path in target.iterdir()))
"""
    )
    assert said == ["['manifest.json', 'metadata.json', 'weights-0', 'weights-1']"] * 2


def test_a_shared_download_to_different_folders_is_refused(job: Job, tmp_path: pathlib.Path) -> None:
    said = job(
        SAVED
        + f"""
say(attempt(lambda: checkpoints.download(uuid, {str(tmp_path)!r} + f"/{{rank}}")))
"""
    )
    for one in said:
        assert one.startswith("MisuseError: download(ckpt_dir=...) got different folders")
        assert "NoSharedDownload" in one


def test_each_rank_can_download_for_itself(job: Job, tmp_path: pathlib.Path) -> None:
    said = job(
        SAVED
        + f"""
target = pathlib.Path({str(tmp_path)!r}, str(rank))
checkpoints.download(uuid, target, core.DownloadMode.NoSharedDownload)
say((target / f"weights-{{1 - rank}}").read_text())
"""
    )
    assert said == ["1", "0"]
