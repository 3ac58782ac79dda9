"""core_context.checkpoint: saving, reading, choosing files, metadata, records, deleting."""

from __future__ import annotations

import json
import os
import pathlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from determined import core, errors, tracking


@pytest.fixture
def context() -> Iterator[core.Context]:
    with core.init() as context:
        yield context


@pytest.fixture
def checkpoints(context: core.Context) -> core.CheckpointContext:
    return context.checkpoint


def save(checkpoints: core.CheckpointContext, metadata: Any = None) -> str:
    """Save a checkpoint of two files, one in a folder."""
    with checkpoints.store_path(metadata) as (folder, storage_id):
        (folder / "weights").write_bytes(b"12345")
        (folder / "code").mkdir()
        (folder / "code" / "model.py").write_text("x = 1")
    return storage_id


def files(folder: pathlib.Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


ALL = {"weights", "code/model.py", "metadata.json", "manifest.json"}


def is_python(name: str) -> bool:
    return name.endswith(".py")


def test_stored_files_come_back(checkpoints: core.CheckpointContext) -> None:
    storage_id = save(checkpoints)
    with checkpoints.restore_path(storage_id) as folder:
        assert (folder / "weights").read_bytes() == b"12345"
        assert (folder / "code" / "model.py").read_text() == "x = 1"


def test_shard_of_the_only_rank_is_the_checkpoint(checkpoints: core.CheckpointContext) -> None:
    with checkpoints.store_path(shard=True) as (folder, storage_id):
        (folder / "weights").touch()
    with checkpoints.restore_path(storage_id) as folder:
        assert files(folder) == {"weights", "metadata.json", "manifest.json"}


def test_checkpoint_is_not_there_before_the_block_ends(checkpoints: core.CheckpointContext) -> None:
    with checkpoints.store_path() as (_, storage_id), pytest.raises(errors.CheckpointNotFoundException):
        checkpoints.get_metadata(storage_id)


def test_checkpoints_are_in_the_home_folder(checkpoints: core.CheckpointContext) -> None:
    storage_id = save(checkpoints)
    assert files(pathlib.Path(os.environ["DET_HOME"], "checkpoints", storage_id)) == ALL


def test_checkpoints_go_to_the_folder_that_was_given(tmp_path: pathlib.Path) -> None:
    with core.init(checkpoint_storage=tmp_path / "mine") as context:
        storage_id = save(context.checkpoint)
    assert files(tmp_path / "mine" / storage_id) == ALL


def test_another_run_can_read_a_checkpoint(tmp_path: pathlib.Path) -> None:
    with core.init() as context:
        storage_id = save(context.checkpoint)
    with core.init() as context, context.checkpoint.restore_path(storage_id) as folder:
        assert files(folder) == ALL


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_exception_in_the_block_leaves_nothing(
    error: type[BaseException], context: core.Context, records: tracking.TrackingReader
) -> None:
    def fail() -> None:
        with context.checkpoint.store_path() as (folder, _):
            (folder / "weights").touch()
            raise error

    with pytest.raises(error):
        fail()
    context.flush()
    assert list(context.checkpoint.store.root.iterdir()) == []
    assert records.checkpoints() == []


def test_upload_copies_a_folder(checkpoints: core.CheckpointContext, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "file").write_text("content")
    storage_id = checkpoints.upload(source, {"steps_completed": 3})
    with checkpoints.restore_path(storage_id) as folder:
        assert (folder / "deep" / "er" / "file").read_text() == "content"
    assert checkpoints.get_metadata(storage_id) == {"steps_completed": 3}


def test_upload_takes_a_relative_path(
    checkpoints: core.CheckpointContext, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("source").mkdir()
    pathlib.Path("source/file").touch()
    with checkpoints.restore_path(checkpoints.upload("source")) as folder:
        assert files(folder) == {"file", "metadata.json", "manifest.json"}


def test_upload_honours_the_selector(checkpoints: core.CheckpointContext, tmp_path: pathlib.Path) -> None:
    for name in ("a.py", "b.txt"):
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / name).touch()
    storage_id = checkpoints.upload(tmp_path / "source", selector=is_python)
    with checkpoints.restore_path(storage_id) as folder:
        assert files(folder) == {"a.py", "metadata.json", "manifest.json"}


@pytest.mark.parametrize("kind", ["nothing", "file"])
def test_upload_of_no_folder_is_refused(kind: str, checkpoints: core.CheckpointContext, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.StorageException, match=kind):
        checkpoints.upload(tmp_path / kind)


def test_download_copies_all_files(checkpoints: core.CheckpointContext, tmp_path: pathlib.Path) -> None:
    checkpoints.download(save(checkpoints), tmp_path / "deep" / "target")
    assert files(tmp_path / "deep" / "target") == ALL


def test_download_honours_the_selector(checkpoints: core.CheckpointContext, tmp_path: pathlib.Path) -> None:
    checkpoints.download(save(checkpoints), tmp_path / "target", selector=is_python)
    assert files(tmp_path / "target") == {"code/model.py"}


def test_download_of_no_files_makes_the_folder(checkpoints: core.CheckpointContext, tmp_path: pathlib.Path) -> None:
    checkpoints.download(save(checkpoints), tmp_path / "target", selector=lambda _: False)
    assert list((tmp_path / "target").iterdir()) == []


def test_download_to_a_file_is_refused(checkpoints: core.CheckpointContext, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.StorageException, match="pass a folder"):
        checkpoints.download(save(checkpoints), tmp_path / "file")


def test_changing_a_download_leaves_the_checkpoint_alone(
    checkpoints: core.CheckpointContext, tmp_path: pathlib.Path
) -> None:
    storage_id = save(checkpoints)
    checkpoints.download(storage_id, tmp_path / "target")
    (tmp_path / "target" / "weights").write_bytes(b"")
    with checkpoints.restore_path(storage_id) as folder:
        assert (folder / "weights").read_bytes() == b"12345"


def test_restore_path_honours_the_selector(checkpoints: core.CheckpointContext) -> None:
    with checkpoints.restore_path(save(checkpoints), selector=is_python) as folder:
        assert files(folder) == {"code/model.py"}
        assert (folder / "code" / "model.py").read_text() == "x = 1"


def test_folder_of_chosen_files_is_gone_afterwards(checkpoints: core.CheckpointContext) -> None:
    storage_id = save(checkpoints)
    with checkpoints.restore_path(storage_id, selector=is_python) as chosen:
        pass
    assert not chosen.exists()
    with checkpoints.restore_path(storage_id) as folder:
        assert files(folder) == ALL


@pytest.mark.parametrize("mode", core.DownloadMode)
def test_both_download_modes_work_in_one_process(
    mode: core.DownloadMode, checkpoints: core.CheckpointContext, tmp_path: pathlib.Path
) -> None:
    storage_id = save(checkpoints)
    checkpoints.download(storage_id, tmp_path / "target", mode)
    with checkpoints.restore_path(storage_id, mode) as folder:
        assert files(folder) == files(tmp_path / "target") == ALL


def test_other_download_modes_are_refused(checkpoints: core.CheckpointContext, tmp_path: pathlib.Path) -> None:
    storage_id = save(checkpoints)
    with pytest.raises(TypeError, match=r"core\.DownloadMode"):
        checkpoints.download(storage_id, tmp_path, "shared")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"core\.DownloadMode"), checkpoints.restore_path(storage_id, "shared"):  # type: ignore[arg-type]
        pass


def test_metadata_comes_back(checkpoints: core.CheckpointContext) -> None:
    metadata = {"steps_completed": 5, "nested": {"list": [1, None, "é"]}}
    assert checkpoints.get_metadata(save(checkpoints, metadata)) == metadata


def test_metadata_may_be_left_out(checkpoints: core.CheckpointContext) -> None:
    assert checkpoints.get_metadata(save(checkpoints)) == {}


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ({"model": object()}, ValueError),
        ({"steps": {1, 2}}, ValueError),
        ({(1, 2): 3}, ValueError),
        ([1], TypeError),
        ("text", TypeError),
        ({"steps_completed": "many"}, ValueError),
        ({"steps_completed": None}, ValueError),
        ({"steps_completed": -1}, ValueError),
    ],
)
def test_bad_metadata_is_refused_before_anything_is_written(
    metadata: Any, kind: type[Exception], checkpoints: core.CheckpointContext
) -> None:
    with pytest.raises(kind, match="checkpoint metadata"), checkpoints.store_path(metadata):
        pytest.fail("the block began")
    assert checkpoints.store.list() == []


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_damaged_metadata_is_named(content: str | None, checkpoints: core.CheckpointContext) -> None:
    storage_id = save(checkpoints)
    path = checkpoints.store.path(storage_id) / "metadata.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(errors.InvalidCheckpointException, match=r"metadata\.json"):
        checkpoints.get_metadata(storage_id)


TRICKS = ["", ".", "..", "../x", "/etc", "a/b", "a\\b", "x\0y", "a\n", ".hidden", "x.partial", "~", "x" * 200, None, 5]


@pytest.mark.parametrize("storage_id", TRICKS)
def test_ids_that_are_none_are_refused(
    storage_id: Any, checkpoints: core.CheckpointContext, tmp_path: pathlib.Path
) -> None:
    def restore() -> None:
        with checkpoints.restore_path(storage_id):
            pass

    actions: list[Callable[[], object]] = [
        restore,
        lambda: checkpoints.get_metadata(storage_id),
        lambda: checkpoints.delete(storage_id),
        lambda: checkpoints.download(storage_id, tmp_path / "target"),
    ]
    for action in actions:
        with pytest.raises(errors.InvalidCheckpointException, match="is not a checkpoint id"):
            action()


def test_unknown_id_says_where_to_look(checkpoints: core.CheckpointContext) -> None:
    with pytest.raises(errors.CheckpointNotFoundException, match="det checkpoint list") as caught:
        checkpoints.get_metadata("no-such-id")
    assert isinstance(caught.value, FileNotFoundError)
    assert str(checkpoints.store.root) in str(caught.value)


def test_checkpoint_is_recorded_with_its_files(context: core.Context, records: tracking.TrackingReader) -> None:
    metadata = {"steps_completed": 12, "note": "n"}
    storage_id = save(context.checkpoint, metadata)
    context.flush()
    (record,) = records.checkpoints()
    sizes = {"weights": 5, "code/model.py": 5, "metadata.json": len(json.dumps(metadata, indent=2))}
    assert (record.uuid, record.steps_completed, record.metadata) == (storage_id, 12, metadata)
    assert (record.resources, record.size) == (sizes, sum(sizes.values()))
    assert pathlib.Path(record.path) == context.checkpoint.store.path(storage_id)
    assert record.state is tracking.CheckpointState.COMPLETED


def test_earlier_reports_are_recorded_when_the_checkpoint_appears(
    context: core.Context, records: tracking.TrackingReader
) -> None:
    context.train.report_training_metrics(1, {"loss": 1.0})
    save(context.checkpoint)
    assert len(records.metrics(records.trials(1)[0].id)) == 1


def test_deleted_checkpoint_is_gone_and_its_record_says_so(
    context: core.Context, records: tracking.TrackingReader
) -> None:
    storage_id = save(context.checkpoint)
    context.checkpoint.delete(storage_id)
    assert list(context.checkpoint.store.root.iterdir()) == []
    assert records.checkpoint(storage_id).state is tracking.CheckpointState.DELETED
    with pytest.raises(errors.CheckpointNotFoundException):
        context.checkpoint.delete(storage_id)


def change_database(statement: str) -> None:
    connection = sqlite3.connect(pathlib.Path(os.environ["DET_HOME"], "tracking.db"))
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_checkpoint_whose_deletion_cannot_be_recorded_stays(context: core.Context) -> None:
    storage_id = save(context.checkpoint)
    context.flush()
    change_database("ALTER TABLE checkpoints RENAME TO aside")
    with pytest.raises(errors.TrackingException):
        context.checkpoint.delete(storage_id)
    change_database("ALTER TABLE aside RENAME TO checkpoints")
    assert context.checkpoint.store.list() == [storage_id]
