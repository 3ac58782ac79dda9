"""Disks that are full, read-only, gone or lying: said clearly, and never at the cost of what was saved before."""

from __future__ import annotations

import logging
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from determined import pytorch, storage
from determined.errors import StorageException, TrackingException
from determined.pytorch import Batch
from saving import trial_with
from trials import SEED, LineTrial, fit, records, saved_at, state_in, trainer

Mount = Callable[..., pathlib.Path]


@pytest.fixture
def mount(tmp_path: pathlib.Path) -> Iterator[Mount]:
    """Mount something at a folder, for as long as the test runs."""
    mounted: list[pathlib.Path] = []

    def run(*arguments: str, at: str) -> pathlib.Path:
        folder = tmp_path / at
        folder.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield run
    for folder in reversed(mounted):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def tmpfs(mount: Mount, kilobytes: int, at: str = "small") -> pathlib.Path:
    return mount("-t", "tmpfs", "-o", f"size={max(kilobytes, 4)}k", "tmpfs", at=at)


def read_only(mount: Mount, folder: pathlib.Path) -> None:
    mount("--bind", str(folder), at=folder.name)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)


class MegabyteTrial(LineTrial):
    """Has about a megabyte of state."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 80), nn.Linear(80, 1000), nn.Linear(1000, 1))


class Waiting(pytorch.PyTorchCallback):
    """Makes each checkpoint complete before training goes on."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None: ...


def fit_to(store: pathlib.Path, trial_class: type[LineTrial] = LineTrial, **arguments: Any) -> Any:
    return fit(trial_class, {"exp_conf": kept_in(store)}, **arguments)


def kept_in(store: pathlib.Path) -> dict[str, Any]:
    return {**SEED, "checkpoint_storage": {"type": "directory", "container_path": str(store)}}


def kilobytes_of(folder: pathlib.Path) -> int:
    """Return what a folder takes on a file system of pages."""
    return sum(-(-path.stat().st_size // 4096) * 4 for path in folder.rglob("*") if path.is_file())


# No room


@pytest.fixture(scope="module")
def checkpoint_kilobytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("DET_PROGRESS", "0")
        fit(MegabyteTrial, max_length=Batch(1))
        return kilobytes_of(pathlib.Path(records().checkpoints()[-1].path))


def test_full_disk_ends_training_with_what_was_saved_intact(mount: Mount, checkpoint_kilobytes: int) -> None:
    for megabytes in range(3 * checkpoint_kilobytes // 1024 + 1):
        store = tmpfs(mount, megabytes * 1024, at=f"disk-{megabytes}")
        with pytest.raises(StorageException) as caught:
            fit_to(store, MegabyteTrial, max_length=Batch(4), checkpoint_period=Batch(1))
        assert str(store) in str(caught.value)
        assert "No space left on device" in str(caught.value)
        room = megabytes * 1024 // checkpoint_kilobytes
        assert saved_at(trial_id=megabytes + 1) == list(range(1, room + 1))
        saved = [one.uuid for one in records().checkpoints(trial_id=megabytes + 1)]
        assert sorted(path.name for path in store.iterdir()) == sorted(saved)
        if saved:
            assert f"The last good checkpoint is {saved[-1]}." in str(caught.value)
            last = storage.FolderStore(store).open(saved[-1])
            last.verify()
            assert state_in(last.folder)["loop"]["progress"]["batches_trained"] == room


def test_training_goes_on_from_what_a_full_disk_left(mount: Mount, checkpoint_kilobytes: int) -> None:
    store = tmpfs(mount, int(1.5 * checkpoint_kilobytes))
    with pytest.raises(StorageException):
        fit_to(store, MegabyteTrial, max_length=Batch(5), checkpoint_period=Batch(1))
    subprocess.run(["mount", "-o", f"remount,size={3 * checkpoint_kilobytes}k", str(store)], check=True)
    resumed = fit_to(store, MegabyteTrial, max_length=Batch(3), latest_checkpoint="latest")
    assert resumed.seen == [(0, 1), (0, 2)]


# No room for the record


def filling(folder: pathlib.Path, full_at: int, free_at: int | None = None) -> type[LineTrial]:
    """Returns a trial before whose batch the disk is filled, and maybe emptied again."""

    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == full_at:
                self.context.get_trial_id()
                with (folder / "filler").open("wb", buffering=0) as file:
                    for size in (1 << 16, 1 << 12):
                        fill(file, size)
            if batch_idx == free_at:
                (folder / "filler").unlink()
            return super().train_batch(batch, epoch_idx, batch_idx)

    return Trial


def fill(file: Any, size: int) -> None:
    try:
        while True:
            file.write(bytes(size))
    except OSError:
        return


@pytest.fixture
def small_home(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    home = tmpfs(mount, 4096, at="home")
    monkeypatch.setenv("DET_HOME", str(home))
    return home


# Reports of a megabyte together, so that no database has room for them in what it has claimed already.
REPORTS = 30


class ManyMetricsTrial(LineTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return {**super().train_batch(batch, epoch_idx, batch_idx), **{f"metric {i}": i / 7 for i in range(1000)}}


def test_training_goes_on_with_a_full_disk_for_the_record_and_says_what_is_missing(
    small_home: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    trial = type("Trial", (filling(small_home, full_at=2), ManyMetricsTrial), {})
    with (
        caplog.at_level(logging.WARNING, "determined.core"),
        pytest.raises(
            TrackingException, match=r"\d+ reports of this run are not in .*tracking\.db.*checkpoints are safe"
        ),
    ):
        fit_to(tmp_path / "store", trial, max_length=Batch(REPORTS), reporting_period=Batch(1))
    (uuid,) = storage.FolderStore(tmp_path / "store").list()
    assert state_in(tmp_path / "store" / uuid)["loop"]["progress"]["batches_trained"] == REPORTS
    complaints = [record for record in caplog.records if "record of this run cannot" in record.getMessage()]
    assert len([one for one in complaints if "record of this run" in one.getMessage()]) == 1


def test_record_is_complete_when_the_disk_has_room_again(
    small_home: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    trial = type("Trial", (filling(small_home, full_at=2, free_at=20), LineTrial), {})
    with caplog.at_level(logging.ERROR):
        fit_to(tmp_path / "store", trial, max_length=Batch(REPORTS), reporting_period=Batch(1))
    reported = [report.steps_completed for report in records().metrics(1, "training")]
    assert reported == list(range(1, REPORTS + 1))
    assert saved_at() == [REPORTS]


# Stores that cannot be used


def test_read_only_store_is_refused_before_training(mount: Mount, tmp_path: pathlib.Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    read_only(mount, store)
    with trainer(exp_conf=kept_in(store)) as (its_trainer, trial):
        with pytest.raises(StorageException, match=f"{store}.* cannot be written .Read-only file system"):
            its_trainer.fit(max_length=Batch(2))
        assert trial.seen == []


def test_store_that_becomes_read_only_keeps_what_it_has(mount: Mount, tmp_path: pathlib.Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    mount("--bind", str(store), at="store")

    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 3:
                subprocess.run(["mount", "-o", "remount,ro,bind", str(store)], check=True)
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytest.raises(StorageException, match=r"The checkpoint of batch 4 is not saved.*Read-only file system"):
        fit_to(store, trial_with(Waiting(), Trial), checkpoint_period=Batch(2))
    (uuid,) = storage.FolderStore(store).list()
    # Reading needs no room and no permission to write.
    saved = storage.FolderStore(store).open(uuid)
    saved.verify()
    assert state_in(saved.folder)["loop"]["progress"]["batches_trained"] == 2


def removing(store: pathlib.Path) -> type[LineTrial]:
    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 3:
                shutil.rmtree(store)
            return super().train_batch(batch, epoch_idx, batch_idx)

    return Trial


def test_store_that_is_removed_is_made_anew_for_the_next_checkpoint(tmp_path: pathlib.Path) -> None:
    store = tmp_path / "store"
    fit_to(store, trial_with(Waiting(), removing(store)), max_length=Batch(4), checkpoint_period=Batch([1]))
    (uuid,) = storage.FolderStore(store).list()
    assert fit_to(store, latest_checkpoint=uuid).seen[0] == (0, 4)


def test_store_removed_in_the_middle_of_a_write_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, save = tmp_path / "store", torch.save

    def save_into_nothing(value: Any, file: Any) -> None:
        save(value, file)
        if hasattr(file, "name"):
            shutil.rmtree(store)

    monkeypatch.setattr(torch, "save", save_into_nothing)
    with pytest.raises(StorageException, match=f"batch 1 is not saved. {store}/.*No such file or directory"):
        fit_to(store, max_length=Batch(1))
    assert saved_at() == []


def test_store_may_be_a_link_to_a_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    fit_to(tmp_path / "link", max_length=Batch(2))
    (uuid,) = storage.FolderStore(tmp_path / "real").list()
    assert fit_to(tmp_path / "link", latest_checkpoint=uuid).seen[0] == (0, 2)


def test_link_to_nothing_is_refused_before_training(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with trainer(exp_conf=kept_in(tmp_path / "link")) as (its_trainer, trial):
        with pytest.raises(
            StorageException, match=r"link is a link to nowhere, which does not exist; make that folder"
        ):
            its_trainer.fit(max_length=Batch(2))
        assert trial.seen == []


def test_file_instead_of_a_store_is_refused_before_training(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with trainer(exp_conf=kept_in(tmp_path / "file")) as (its_trainer, trial):
        with pytest.raises(StorageException, match=f"{tmp_path}/file cannot be written"):
            its_trainer.fit(max_length=Batch(2))
        assert trial.seen == []


def test_check_of_a_store_leaves_nothing(tmp_path: pathlib.Path) -> None:
    storage.FolderStore(tmp_path / "store").check()
    assert list((tmp_path / "store").iterdir()) == []


def test_store_within_the_program_is_not_copied_into_checkpoints(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.mkdir()
    (program / "mine.py").write_text("from trials import LineTrial\n\n\nclass Mine(LineTrial):\n    pass\n")
    monkeypatch.syspath_prepend(program)
    import mine

    store = program / "checkpoints"
    fit_to(store, mine.Mine, max_length=Batch(3), checkpoint_period=Batch(1))
    for uuid in storage.FolderStore(store).list():
        assert [path.name for path in (store / uuid / "code").rglob("*") if path.is_file()] == ["mine.py"]
