"""Record and store brought together again: by a run that continues, and by what `det gc` uses."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from determined import core, storage, tracking
from determined._home import home
from determined.core.checkpoint_gc import mark_missing, record_unrecorded, remove_unlisted

Run = Callable[..., Any]
DELETED = tracking.CheckpointState.DELETED
COMPLETED = tracking.CheckpointState.COMPLETED

SAVE = """
from determined import core
with core.init() as context:
    context.train.report_training_metrics(3, {"loss": 0.5})
    with context.checkpoint.store_path({"steps_completed": 3}) as (folder, _):
        (folder / "weights").write_text("12345")
"""


def store() -> storage.FolderStore:
    return storage.FolderStore(home().checkpoints)


def save(steps: int = 0) -> str:
    with core.init() as context, context.checkpoint.store_path({"steps_completed": steps}) as (folder, uuid):
        (folder / "weights").write_text("12345")
    return uuid


def states(records: tracking.TrackingReader) -> dict[str, tracking.CheckpointState]:
    return {one.uuid: one.state for one in records.checkpoints()}


def forge(uuid: str, metadata: Any = None, **origin: Any) -> None:
    """Put a whole checkpoint into the store whose origin says what a damaged or hostile one might."""
    ours = {"database": str(home().database), "experiment_id": 1, "trial_id": 1}
    with store().create(uuid, ours | origin) as folder:
        (folder / "metadata.json").write_text(json.dumps({} if metadata is None else metadata))


# Checkpoints that a crash kept from the record


def test_checkpoint_of_a_run_that_died_before_recording_it_is_recorded_as_it_would_have_been(
    run_program: Run, records: tracking.TrackingReader
) -> None:
    assert run_program(SAVE, DET_DIE_AT="committed").returncode == -9
    assert records.checkpoints() == []
    (uuid,) = store().list()
    assert record_unrecorded(store(), home().database) == [uuid]
    (one,) = records.checkpoints()
    assert (one.uuid, one.experiment_id, one.trial_id, one.steps_completed) == (uuid, 1, 1, 3)
    assert one.resources["weights"] == one.size - one.resources["metadata.json"] == 5
    assert one.path == str(store().path(uuid))
    assert [report.metrics for report in records.metrics(1)] == [{"loss": 0.5}]


def test_recording_twice_records_once(records: tracking.TrackingReader) -> None:
    save()
    forge("found")
    assert record_unrecorded(store(), home().database) == ["found"]
    assert record_unrecorded(store(), home().database) == []
    assert len(records.checkpoints()) == 2


@pytest.mark.parametrize(
    "origin",
    [
        {"database": "/elsewhere/tracking.db"},
        {"database": None},
        {"experiment_id": 99},
        {"trial_id": 99},
        {"trial_id": 10**30},
        {"trial_id": "1; DROP TABLE trials"},
        {"trial_id": [1]},
        {"experiment_id": None},
        {"experiment_id": {"a": 1}},
    ],
)
def test_checkpoint_of_another_origin_is_left_alone(origin: dict[str, Any], records: tracking.TrackingReader) -> None:
    uuid = save()
    forge("foreign", **origin)
    assert record_unrecorded(store(), home().database) == []
    assert list(states(records)) == [uuid]
    assert "foreign" in store().list()


@pytest.mark.parametrize("steps", [10**30, -1, "many", None, [1], 1.5, True])
def test_checkpoint_with_impossible_steps_is_left_alone(steps: Any, records: tracking.TrackingReader) -> None:
    save()
    forge("odd", {"steps_completed": steps})
    with pytest.warns(UserWarning, match=r"odd is not on record and is passed over: .*metadata\.json"):
        assert record_unrecorded(store(), home().database) == []


def test_damaged_checkpoint_is_not_recorded() -> None:
    save()
    forge("damaged")
    (store().path("damaged") / "metadata.json").write_text("[]")
    with pytest.warns(UserWarning, match=r"damaged is not on record and is passed over: .*metadata\.json is damaged"):
        assert record_unrecorded(store(), home().database) == []


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_checkpoints_are_recorded_in_the_order_of_their_steps_whatever_the_clock_said(
    order: tuple[int, ...], records: tracking.TrackingReader
) -> None:
    save()
    for clock, steps in enumerate(order):
        forge(f"after-{steps}", {"steps_completed": steps})
        os.utime(store().path(f"after-{steps}"), (clock, clock))
    assert record_unrecorded(store(), home().database) == ["after-1", "after-2", "after-3"]
    assert [one.steps_completed for one in records.checkpoints(trial_id=1)] == [0, 1, 2, 3]


def test_checkpoints_of_an_earlier_trial_are_recorded_first(records: tracking.TrackingReader) -> None:
    save()
    save()
    forge("later", {"steps_completed": 1}, experiment_id=2, trial_id=2)
    forge("earlier", {"steps_completed": 5})
    assert record_unrecorded(store(), home().database) == ["earlier", "later"]


def test_pipe_in_a_forged_checkpoint_is_not_waited_for() -> None:
    save()
    forge("forged")
    (store().path("forged") / "metadata.json").unlink()
    storage.Manifest({}, storage.Manifest.read(store().path("forged")).origin).write(store().path("forged"))
    os.mkfifo(store().path("forged") / "metadata.json")
    with pytest.warns(UserWarning, match="forged is not on record and is passed over: .*it is not a plain file"):
        assert record_unrecorded(store(), home().database) == []


# Checkpoints that are on record as deleted


def test_bytes_of_deleted_checkpoints_are_removed_and_no_others(
    run_program: Run, records: tracking.TrackingReader
) -> None:
    kept, doomed = save(), save()
    deleting = f"from determined import core\nwith core.init() as c:\n    c.checkpoint.delete({doomed!r})"
    assert run_program(deleting, DET_DIE_AT="unlisted").returncode == -9
    assert states(records) == {kept: COMPLETED, doomed: DELETED}
    assert remove_unlisted(store(), home().database) == [doomed]
    assert store().list() == [kept]
    assert remove_unlisted(store(), home().database) == []


def test_deleted_checkpoint_is_never_recorded_anew(run_program: Run, records: tracking.TrackingReader) -> None:
    doomed = save()
    deleting = f"from determined import core\nwith core.init() as c:\n    c.checkpoint.delete({doomed!r})"
    run_program(deleting, DET_DIE_AT="unlisted")
    assert record_unrecorded(store(), home().database) == []
    assert states(records) == {doomed: DELETED}


def test_half_removed_checkpoint_is_not_listed_and_cleared(run_program: Run) -> None:
    doomed = save()
    deleting = f"from determined import core\nwith core.init() as c:\n    c.checkpoint.delete({doomed!r})"
    assert run_program(deleting, DET_DIE_AT="to_delete").returncode == -9
    assert store().list() == []
    assert store().clear_leftovers() == [f"{doomed}.partial"]
    assert list(home().checkpoints.iterdir()) == []


# Checkpoints whose folder is gone


def test_record_of_a_vanished_checkpoint_is_closed(records: tracking.TrackingReader) -> None:
    kept, lost = save(), save()
    shutil.rmtree(store().path(lost))
    assert mark_missing(store(), home().database) == [lost]
    assert states(records) == {kept: COMPLETED, lost: DELETED}


def test_checkpoints_of_other_stores_are_not_missed(tmp_path: pathlib.Path, records: tracking.TrackingReader) -> None:
    save()
    with core.init(checkpoint_storage=tmp_path / "other") as context, context.checkpoint.store_path() as (_, uuid):
        pass
    assert mark_missing(store(), home().database) == []
    assert states(records)[uuid] is COMPLETED


@pytest.mark.parametrize("is_there", [True, False])
def test_store_without_any_checkpoint_closes_no_record(is_there: bool, records: tracking.TrackingReader) -> None:
    uuid = save()
    shutil.rmtree(home().checkpoints)
    if is_there:
        home().checkpoints.mkdir()
    assert mark_missing(store(), home().database) == []
    assert states(records) == {uuid: COMPLETED}
