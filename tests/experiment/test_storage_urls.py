"""Runs, searches and commands whose checkpoints are in an S3 server."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
import torch

import forking
from det_command import run_det
from determined import core, errors, pytorch, storage
from determined._home import home
from determined.pytorch import Batch
from determined.tracking import CheckpointState, RunState
from object_servers import S3Server
from trials import LineTrial, assert_same, fit, records, saved_at

SECRET = "hush-hush-hush"
MODEL = """
from trials import LineTrial


class Line(LineTrial):
    def __init__(self, context):
        context.get_hparam("rate")
        super().__init__(context)
"""
CONFIG = """
name: urls
entrypoint: model_def:Line
searcher: {{name: grid, metric: validation_loss, max_length: {{batches: 4}}}}
hyperparameters:
  rate: {{type: categorical, vals: [1, 2, 3]}}
min_checkpoint_period: {{batches: 2}}
max_restarts: 0
checkpoint_storage:
  type: s3
  bucket: {bucket}
  prefix: search
  endpoint_url: {url}
  access_key: tests
  secret_key: {secret}
  save_trial_best: 0
  save_trial_latest: 1
environment:
  environment_variables: [PYTHONPATH={path}]
"""


def forget_copies() -> None:
    """Remove what this machine has of checkpoints that are elsewhere."""
    shutil.rmtree(home().stores, ignore_errors=True)


def test_training_continues_by_latest_id_and_url(s3_url: str, tmp_path: pathlib.Path) -> None:
    init = {"checkpoint_storage": s3_url}
    fit(init=init, max_length=Batch(2))
    (record,) = records().checkpoints()
    assert record.path == s3_url.replace("/team", f"/team/{record.uuid}")
    states = []
    for given in ("latest", record.uuid, record.path):
        forget_copies()
        resumed = fit(init=init, max_length=Batch(4), latest_checkpoint=given)
        assert resumed.seen == [(0, 2), (0, 3)]
        states.append(resumed.model.state_dict())
        newest = records().checkpoints()[-1]
        assert run_det("checkpoint", "delete", newest.uuid, "--yes").exit_code == 0
    whole = fit(init={"checkpoint_storage": tmp_path / "folder"}, max_length=Batch(4))
    for state in states:
        assert_same(state, whole.model.state_dict())


def test_trial_is_loaded_from_a_url(s3_url: str) -> None:
    trained = fit(init={"checkpoint_storage": s3_url}, max_length=Batch(2))
    forget_copies()
    (record,) = records().checkpoints()
    loaded = pytorch.load_trial_from_checkpoint_path(record.path, trial_class=LineTrial)
    assert torch.equal(loaded.model.weight, trained.model.weight)


def test_training_does_not_wait_for_a_store_that_is_away(s3: S3Server, s3_url: str) -> None:
    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 1:
                s3.stop()
            if batch_idx == 5:  # the checkpoint of batch 2 was saved meanwhile, and is not on record
                assert saved_at() == []
                s3.start()
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Trial, {"checkpoint_storage": s3_url}, max_length=Batch(6), checkpoint_period=Batch(2))
    assert sorted(saved_at()) == [2, 4, 6]
    assert len(storage.store_for(s3_url, home().checkpoints).list()) == 3


def test_hook_after_the_upload_finds_the_checkpoint_in_the_store(s3_url: str) -> None:
    found = []

    class Remember(pytorch.PyTorchCallback):
        def on_checkpoint_upload_end(self, uuid: str) -> None:
            found.append(uuid in storage.store_for(s3_url, home().checkpoints).list())

    class Trial(LineTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"remember": Remember()}

    fit(Trial, {"checkpoint_storage": s3_url}, checkpoint_period=Batch(2))
    assert found == [True] * 3


def test_retention_deletes_in_the_store(s3: S3Server, bucket: str) -> None:
    section = {"type": "s3", "bucket": bucket, "endpoint_url": s3.url, "save_trial_best": 0, "save_trial_latest": 1}
    fit(init={"exp_conf": {"checkpoint_storage": section}}, max_length=Batch(6), checkpoint_period=Batch(2))
    assert [(one.steps_completed, one.state) for one in records().checkpoints()] == [
        (2, CheckpointState.DELETED),
        (4, CheckpointState.DELETED),
        (6, CheckpointState.COMPLETED),
    ]
    assert storage.store_for(section, home().checkpoints).list() == [records().checkpoints()[-1].uuid]


@pytest.mark.process
def test_next_run_records_what_a_killed_one_had_saved(s3: S3Server, s3_url: str, run_program: Any) -> None:
    program = "from trials import fit\nfrom determined.pytorch import Batch\nimport os\n"
    program += "fit(init={'checkpoint_storage': os.environ['STORE'], 'exp_conf': {'name': 'x'}}, max_length=Batch(2))"
    assert run_program(program, STORE=s3_url, DET_DIE_AT="upload_began").returncode == -9
    assert saved_at() == []
    trial = fit(
        init={"checkpoint_storage": s3_url, "exp_conf": {"name": "x"}}, max_length=Batch(4), latest_checkpoint="latest"
    )
    assert trial.seen == [(0, 2), (0, 3)]
    assert saved_at(trial_id=1) == [2]


@pytest.mark.process
def test_gc_uploads_and_records_what_a_killed_run_had_saved(s3: S3Server, s3_url: str, run_program: Any) -> None:
    program = "import os\nfrom determined import core\nwith core.init(checkpoint_storage=os.environ['STORE']) as c:\n"
    program += "  c.train.report_training_metrics(1, {'loss': 1})\n  c.checkpoint._recorder.flush()\n"
    program += "  with c.checkpoint.store_path() as (folder, uuid): (folder / 'file').write_text('x')\n"
    program += "  c.checkpoint.wait()"
    assert run_program(program, STORE=s3_url, DET_DIE_AT="upload_began").returncode == -9
    doctor = run_det("doctor")
    assert doctor.exit_code == 1
    assert f"1 checkpoints are in {home().stores}, but not yet in {s3_url}" in doctor.output
    result = run_det("gc")
    assert "1 interrupted uploads finished" in result.output, result.output
    assert [one.uuid for one in records().checkpoints()] == list(storage.store_for(s3_url, home().checkpoints).list())
    assert run_det("gc", s3_url).exit_code == 0


def test_core_reads_and_deletes_at_once(s3_url: str, tmp_path: pathlib.Path) -> None:
    with core.init(checkpoint_storage=s3_url) as context:
        with context.checkpoint.store_path({"steps_completed": 3}) as (folder, uuid):
            (folder / "file").write_text("text")
        assert context.checkpoint.get_metadata(uuid) == {"steps_completed": 3}
        with context.checkpoint.restore_path(uuid) as folder:
            assert (folder / "file").read_text() == "text"
        context.checkpoint.delete(uuid)
        assert context.checkpoint.store.list() == []
    assert [one.state for one in records().checkpoints()] == [CheckpointState.DELETED]


def test_unusable_store_is_refused_before_anything_is_recorded(s3: S3Server) -> None:
    with pytest.raises(errors.StorageException, match="Create 'no-such-bucket'"):
        core.init(checkpoint_storage=f"s3://no-such-bucket?endpoint_url={s3.url}")
    assert not home().database.exists()


def test_tensorboard_files_go_to_the_store(s3_url: str, tmp_path: pathlib.Path) -> None:
    with core.init(checkpoint_storage=s3_url) as context:
        context.train.report_training_metrics(1, {"loss": 1.0})
        written = context.train.get_tensorboard_path()
    store = storage.store_for(s3_url, home().checkpoints)
    assert isinstance(store, storage.FsspecStore)
    assert store.get_tree(home().tensorboard_prefix(1, 1), tmp_path / "copy") == 1
    (file,) = written.iterdir()
    assert (tmp_path / "copy" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.process
@pytest.mark.thorough
def test_tensorboard_shows_files_that_are_only_in_the_store(s3_url: str, tmp_path: pathlib.Path) -> None:
    fit(init={"checkpoint_storage": s3_url}, max_length=Batch(2))
    shutil.rmtree(home().path / "tensorboard")
    command = [sys.executable, "-m", "determined.cli", "tensorboard", "start", "--trial", "1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[3].rstrip(".")
            shown: list[str] = []
            while not shown:  # it reads its files after it has started
                with urllib.request.urlopen(f"{url}data/plugin/scalars/tags", timeout=30) as answer:
                    shown = [tag for tags in json.load(answer).values() for tag in tags]
            assert "Determined/loss" in shown
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_deleted_experiment_leaves_nothing_in_the_store(s3_url: str) -> None:
    fit(init={"exp_conf": {"checkpoint_storage": s3_url}}, max_length=Batch(2))
    store = storage.store_for(s3_url, home().checkpoints)
    assert isinstance(store, storage.FsspecStore)
    assert {name.partition("/")[0] for name in store.objects.find()} == {"tensorboard", *store.list()}
    assert run_det("experiment", "delete", 1, "--yes").exit_code == 0
    assert store.objects.find() == {}


def experiment(tmp_path: pathlib.Path, s3: S3Server, bucket: str, **changes: str) -> pathlib.Path:
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "model_def.py").write_text(MODEL)
    values = {"bucket": bucket, "url": s3.url, "secret": SECRET, "path": forking.PYTHONPATH, **changes}
    (tmp_path / "config.yaml").write_text(CONFIG.format(**values))
    return folder


def follow(config: pathlib.Path, folder: pathlib.Path) -> Any:
    """Run an experiment to its end by the command line."""
    command = ["-m", "determined.cli", "experiment", "create", str(config), str(folder), "--follow"]
    env = {**os.environ, "PYTHONPATH": forking.PYTHONPATH}
    return forking.run(command, env=env, cwd=config.parent, capture_output=True, timeout=240)


def test_experiment_with_an_unusable_store_is_refused(s3: S3Server, bucket: str, tmp_path: pathlib.Path) -> None:
    folder = experiment(tmp_path, s3, "no-such-bucket")
    result = run_det("experiment", "create", tmp_path / "config.yaml", folder)
    assert result.exit_code != 0
    assert "Create 'no-such-bucket'" in result.output
    assert SECRET not in result.output


@pytest.mark.process
@pytest.mark.thorough
def test_trial_killed_before_its_upload_continues_from_what_it_saved(
    s3: S3Server, bucket: str, tmp_path: pathlib.Path
) -> None:
    folder = experiment(tmp_path, s3, bucket, path=f"{forking.PYTHONPATH}, DET_DIE_AT=upload_began")
    config = (tmp_path / "config.yaml").read_text()
    config = config.replace("[1, 2, 3]", "[1]").replace("max_restarts: 0", "max_restarts: 3")
    (tmp_path / "config.yaml").write_text(config.replace("save_trial_latest: 1", "save_trial_latest: 9"))
    result = follow(tmp_path / "config.yaml", folder)
    assert result.returncode == 0, result.stdout + result.stderr
    # Killed while it uploaded one or each of them, it lost neither.
    assert [(one.steps_completed, one.state) for one in records().checkpoints(1)] == [
        (2, CheckpointState.COMPLETED),
        (4, CheckpointState.COMPLETED),
    ]
    (trial,) = records().trials(1)
    assert trial.state is RunState.COMPLETED
    assert trial.restarts in (1, 2)


@pytest.mark.process
@pytest.mark.thorough
def test_search_keeps_its_checkpoints_in_s3(
    s3: S3Server, bucket: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):  # those of the config are used
        monkeypatch.delenv(name)
    folder = experiment(tmp_path, s3, bucket)
    done = follow(tmp_path / "config.yaml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [one.state for one in records().trials(1)] == [RunState.COMPLETED] * 3
    kept = [one for one in records().checkpoints(1) if one.state is CheckpointState.COMPLETED]
    assert [one.steps_completed for one in kept] == [4, 4, 4]
    assert all(one.path == f"s3://{bucket}/search/{one.uuid}?endpoint_url={s3.url}" for one in kept)
    forget_copies()
    assert run_det("checkpoint", "download", kept[0].uuid, "-o", tmp_path / "copy").exit_code == 0
    storage.open_at(str(tmp_path / "copy")).verify()
    shown = "".join(
        run_det(*words).output
        for words in (
            ("experiment", "config", 1),
            ("checkpoint", "describe", kept[0].uuid),
            ("experiment", "describe", 1),
        )
    )
    files = [path for path in home().path.rglob("*") if path.is_file() and path != home().storage_credentials]
    assert SECRET not in done.stdout + done.stderr + shown
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    warm = (tmp_path / "config.yaml").read_text().replace("max_length", "source_trial_id: 1, max_length")
    (tmp_path / "warm.yaml").write_text(warm.replace("[1, 2, 3]", "[1]"))
    forget_copies()
    done = follow(tmp_path / "warm.yaml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
