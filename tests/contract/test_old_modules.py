"""Modules beside the API that programs for Determined import: those that are there, and those that say what to use."""

from __future__ import annotations

import importlib
import logging
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import determined as det
from determined import core, pytorch, tracking, util
from determined.common import set_logger
from determined.experimental import test_one_batch
from determined.horovod import hvd
from trials import LineTrial, fit, records


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        ("determined.keras", "write a PyTorchTrial"),
        ("determined.keras.callbacks", "write a PyTorchTrial"),
        ("determined.transformers", "transformers.TrainerCallback"),
        ("determined.pytorch.deepspeed", "use_fsdp"),
        ("determined.pytorch.experimental", "load_trial_from_checkpoint_path"),
        ("determined.experimental.core_v2", "core.init"),
        ("determined.searcher", "name: custom"),
        ("determined.common.api", "determined.experimental.client"),
        ("determined.common.storage", "core_context.checkpoint"),
    ],
)
def test_module_that_is_not_there_names_what_to_use(module: str, instead: str) -> None:
    with pytest.raises(ImportError, match=instead):
        importlib.import_module(module)


def test_module_that_is_not_there_names_what_to_use_also_as_a_name_of_its_package() -> None:
    with pytest.raises(ImportError, match="load_trial_from_checkpoint_path"):
        from determined.pytorch import experimental  # noqa: F401


def test_horovod_can_be_imported_and_its_use_names_what_to_use() -> None:
    with pytest.raises(AttributeError, match=r"hvd\.rank: .*context\.distributed"):
        hvd.rank()


def test_old_name_of_a_missing_checkpoint_is_the_same_class() -> None:
    assert det.errors.CheckpointNotFound is det.errors.CheckpointNotFoundException


# determined.util and determined.common


def test_chunks_cover_a_sequence() -> None:
    assert list(util.chunks([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]


def test_merged_dicts_keep_both_and_prefer_the_second() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    assert util.merge_dicts(base, {"a": {"c": 4}, "d": {}}) == {"a": {"b": 1, "c": 4}, "d": {}}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}


class Blob:
    """A blob of a service that answers the first requests with a status."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)

    def download_as_bytes(self) -> bytes:
        if self.statuses:
            error = Exception("no")
            error.code = self.statuses.pop(0)  # type: ignore[attr-defined]
            raise error
        return b"contents"


def test_blob_is_downloaded_again_while_the_service_is_busy() -> None:
    assert util.download_gcs_blob_with_backoff(Blob(429, 503), max_backoff=0) == b"contents"


def test_blob_that_is_not_there_is_not_tried_again() -> None:
    blob = Blob(404, 404)
    with pytest.raises(Exception, match="no"):
        util.download_gcs_blob_with_backoff(blob, max_backoff=0)
    assert blob.statuses == [404]


@pytest.mark.parametrize("debug", [True, False])
def test_logger_shows_from_the_level_on(debug: bool) -> None:
    root = logging.getLogger()
    before = root.level
    try:
        set_logger(debug)
        assert root.level == (logging.DEBUG if debug else logging.INFO)
    finally:
        root.setLevel(before)


# Old names of the contexts


def test_epoch_len_counts_the_batches_of_an_epoch() -> None:
    seen = []

    class Asking(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            seen.append(self.context._epoch_len)
            return super().train_batch(batch, epoch_idx, batch_idx)

    trial = fit(Asking, max_length=pytorch.Batch(1))
    assert seen == [len(trial.build_training_data_loader())]


def test_epoch_len_needs_a_running_loop() -> None:
    with pytorch.init() as context, pytest.raises(det.errors.InternalException, match="_epoch_len"):
        _ = context._epoch_len


def test_core_context_starts_and_closes_without_a_block() -> None:
    context = core.init()
    assert context.start() is context
    context.train.report_training_metrics(2, {"loss": 0.5})
    context.close()
    context.close()
    (trial,) = records().trials(1)
    assert trial.state is tracking.RunState.COMPLETED
    assert [report.steps_completed for report in records().metrics(trial.id)] == [2]


def test_alert_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with core.init() as context:
        context.alert(title="low disk", description="2 GB are left", level="error")
    (logged,) = [record for record in caplog.records if "low disk: 2 GB are left" in record.getMessage()]
    assert logged.levelno == logging.ERROR


def test_one_batch_of_a_trial_is_trained_with_values_of_a_search() -> None:
    ranges = {"lr": {"type": "double", "minval": 0.1, "maxval": 0.2}, "width": 3}

    class Counting(LineTrial):
        trained = 0

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.trained += 1
            return super().train_batch(batch, epoch_idx, batch_idx)

    trial = test_one_batch(Counting, {"hyperparameters": ranges})
    assert isinstance(trial, Counting)
    assert trial.trained == 1
    assert 0.1 <= trial.context.get_hparam("lr") <= 0.2
    assert trial.context.get_hparam("width") == 3


# Contexts without a run


def test_dummy_distributed_context_is_alone() -> None:
    dummy = core.DummyDistributedContext()
    assert (dummy.rank, dummy.size, dummy.allgather("x")) == (0, 1, ["x"])


def test_dummy_train_context_checks_and_logs_reports(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train_context = core.DummyTrainContext()
    train_context.report_validation_metrics(3, {"loss": 0.25})
    assert any("0.25" in message for message in caplog.messages)
    with pytest.raises(TypeError, match="must be a dict"):
        train_context.report_validation_metrics(3, [0.25])  # type: ignore[arg-type]
    assert train_context.get_tensorboard_path().is_dir()


def test_dummy_checkpoint_context_saves_and_restores(tmp_path: pathlib.Path) -> None:
    checkpoints = core.DummyCheckpointContext(core.DummyDistributedContext(), tmp_path / "store")
    with checkpoints.store_path({"steps_completed": 2}) as (folder, uuid):
        (folder / "weights").write_text("1")
    with checkpoints.restore_path(uuid) as folder:
        assert (folder / "weights").read_text() == "1"
    assert checkpoints.get_metadata(uuid) == {"steps_completed": 2}
    checkpoints.delete(uuid)


def test_dummy_preempt_context_lets_train_on() -> None:
    assert core.DummyPreemptContext().should_preempt() is False


def test_dummy_searcher_context_gives_one_operation() -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        (operation,) = _completed(core.DummySearcherContext(length=5).operations())
    assert operation.length == 5


def _completed(operations: Any) -> list[Any]:
    seen = []
    for operation in operations:
        operation.report_progress(2)
        operation.report_completed(0.5)
        seen.append(operation)
    return seen


def test_dummy_profiler_context_samples() -> None:
    profiler = core.DummyProfilerContext()
    profiler.on(sampling_interval=0.1, samples_per_report=1)
    profiler.off()


# Commands


def launched(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"determined.launch.{module}", *words], capture_output=True, text=True, timeout=120
    )


def test_wrap_rank_names_the_rank_on_every_line_and_keeps_the_status() -> None:
    program = "import sys; print('a\\nb'); print('c', file=sys.stderr); sys.exit(7)"
    done = launched("wrap_rank", "3", sys.executable, "-c", program)
    assert (done.stdout, done.stderr, done.returncode) == ("[rank=3] a\n[rank=3] b\n", "[rank=3] c\n", 7)


def test_wrap_rank_takes_the_rank_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_RANK", "5")
    assert launched("wrap_rank", "OMPI_RANK", "echo", "a").stdout == "[rank=5] a\n"


def test_wrap_rank_without_a_rank_says_how_it_is_used() -> None:
    done = launched("wrap_rank", "NO_SUCH", "echo")
    assert done.returncode == 2
    assert "neither a rank nor an environment variable" in done.stderr


def test_tensorflow_runs_the_script_once(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    done = launched("tensorflow", "--", str(script), "--lr", "1")
    assert (done.stdout, done.returncode) == ("['--lr', '1']\n", 3)


def test_deepspeed_starts_a_process_a_slot_with_its_rank(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])")
    done = launched("deepspeed", "--nproc-per-node", "2", "--", str(script))
    assert sorted(done.stdout.splitlines()) == ["[rank=0] 0 2 0", "[rank=1] 1 2 1"]


def test_horovod_says_what_starts_ranks() -> None:
    done = launched("horovod", "train.py")
    assert done.returncode == 2
    assert "python -m determined.launch.torch_distributed" in done.stderr
