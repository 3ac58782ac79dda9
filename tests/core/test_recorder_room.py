"""A disk without room for the record: training goes on, and the record is written once there is room."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Iterator

import pytest

from determined import core, errors, tracking
from disks import small_disk

REPORTS = 20
NOTE = "x" * 200_000

Resize = Callable[[str], None]


@pytest.fixture
def disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resize]:
    """Give the home folder a disk of its own, to be given a size or made read-only by mount options."""
    with small_disk(tmp_path / "disk", "4k") as made:
        monkeypatch.setenv("DET_HOME", str(made.folder / "home"))
        yield made.mount


@pytest.fixture
def store(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "store")


def train(context: core.Context, first: int, last: int) -> None:
    for step in range(first, last):
        context.train.report_training_metrics(step, {"loss": step / 7, "note": NOTE})
        context.flush()


def train_and_save(store: str) -> None:
    with core.init(checkpoint_storage=store) as context:
        train(context, 0, REPORTS)
        with context.checkpoint.store_path({"steps_completed": REPORTS}) as (folder, _):
            (folder / "weights").write_text("safe")


def steps(trial_id: int = 1) -> list[int]:
    return [report.steps_completed for report in tracking.TrackingReader().metrics(trial_id)]


@pytest.mark.parametrize("kilobytes", [4, 16, 64, 128, 512, 1024, 1536, 2048, 3072])
def test_training_outlives_a_disk_of_any_size_and_says_what_is_missing(
    kilobytes: int, disk: Resize, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk(f"size={kilobytes}k")
    said = r"reports of this run are not in .*tracking\.db.*Make room"
    with caplog.at_level(logging.WARNING, "determined.core"), pytest.raises(errors.TrackingException, match=said):
        train_and_save(store)
    (uuid,) = (path.name for path in pathlib.Path(store).iterdir())
    assert (pathlib.Path(store) / uuid / "weights").read_text() == "safe"
    (complaint,) = [one.getMessage() for one in caplog.records if "record of this run" in one.getMessage()]
    assert "tracking.db" in complaint
    disk("size=30m")
    found = [
        steps(trial.id)
        for one in tracking.TrackingReader().experiments()
        for trial in tracking.TrackingReader().trials(one.id)
    ]
    assert found in ([], [list(range(len(found[0] if found else [])))])


@pytest.mark.parametrize("kilobytes", [4, 64, 128, 1024])
def test_record_is_complete_once_there_is_room(
    kilobytes: int, disk: Resize, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk(f"size={kilobytes}k")
    with core.init(checkpoint_storage=store) as context:
        train(context, 0, REPORTS // 2)
        disk("size=30m")
        train(context, REPORTS // 2, REPORTS)
    assert steps() == list(range(REPORTS))
    assert tracking.TrackingReader().trial(1).state is tracking.RunState.COMPLETED


def test_run_that_starts_on_a_read_only_disk_is_recorded_once_it_may_be(
    disk: Resize, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk("size=30m,ro")
    with core.init(checkpoint_storage=store) as context:
        train(context, 0, 3)
        disk("rw")
        train(context, 3, 6)
    assert steps() == list(range(6))
    assert "Read-only file system" in caplog.text


def save_and_delete(store: str) -> None:
    with core.init(checkpoint_storage=store) as context:
        with context.checkpoint.store_path() as (_, uuid):
            pass
        with pytest.raises(errors.TrackingException):
            context.checkpoint.delete(uuid)
        assert context.checkpoint.store.list() == [uuid]


def test_deletion_that_cannot_be_recorded_leaves_the_checkpoint(disk: Resize, store: str) -> None:
    with pytest.raises(errors.TrackingException, match="reports of this run are not in"):
        save_and_delete(store)
