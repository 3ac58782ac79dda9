"""core.init(): what it opens, how it records the end of a run, and that it leaves nothing behind."""

from __future__ import annotations

import os
import pathlib
import signal
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import pytest

import determined as det
from determined import core, errors, tracking

OnlyTrial = Callable[[], tracking.TrialRecord]
OURS = "resolute-"


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(OURS)]


def open_files() -> set[str]:
    """What is open below the home folder of the test."""
    home = os.environ["DET_HOME"]
    links = []
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
    return {link for link in links if link.startswith(home)}


def use_everything(context: core.Context) -> None:
    context.train.report_training_metrics(1, {"loss": 1.0})
    context.train.report_validation_metrics(1, {"loss": 1.0})
    with context.checkpoint.store_path({"steps_completed": 1}) as (folder, _):
        (folder / "weights").write_bytes(b"w")
    context.profiler.on(sampling_interval=0.1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("distributed", core.DistributedContext),
        ("train", core.TrainContext),
        ("checkpoint", core.CheckpointContext),
        ("preempt", core.PreemptContext),
        ("searcher", core.SearcherContext),
        ("profiler", core.ProfilerContext),
    ],
)
def test_context_has_every_service(name: str, kind: type) -> None:
    with core.init() as context:
        assert isinstance(getattr(context, name), kind)


def test_local_context_has_no_cluster_info() -> None:
    with core.init() as context:
        assert context.info is None


def test_managed_context_has_the_cluster_info(managed: Callable[..., det.ClusterInfo]) -> None:
    info = managed({"name": "n"}, {"lr": 0.1})
    with core.init() as context:
        assert context.info == info


def test_managed_run_saves_where_its_config_says(
    managed: Callable[..., det.ClusterInfo], tmp_path: pathlib.Path
) -> None:
    managed({"checkpoint_storage": {"type": "shared_fs", "host_path": str(tmp_path / "shared")}})
    with core.init() as context, context.checkpoint.store_path() as (_, storage_id):
        pass
    assert (tmp_path / "shared" / storage_id).is_dir()


def test_given_distributed_context_is_used() -> None:
    mine = core.DistributedContext(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
    with core.init(distributed=mine) as context:
        assert context.distributed is mine


def test_context_is_usable_before_it_is_entered(only_trial: OnlyTrial) -> None:
    context = core.init()
    context.train.set_status("early")
    with context:
        pass
    assert only_trial().status == "early"


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_ends_all_threads(fails: bool) -> None:
    try:
        with core.init() as context:
            use_everything(context)
            assert len(our_threads()) == 2
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert our_threads() == []


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_closes_all_files(fails: bool) -> None:
    try:
        with core.init() as context:
            use_everything(context)
            context.flush()
            assert open_files()
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert open_files() == set()


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("fails", [False, True])
def test_leaving_gives_the_signals_back(which: signal.Signals, fails: bool) -> None:
    def mine(*_: Any) -> None: ...

    before = signal.signal(which, mine)
    try:
        try:
            with core.init():
                assert signal.getsignal(which) is not mine
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert signal.getsignal(which) is mine
    finally:
        signal.signal(which, before)


def test_run_can_follow_run(records: tracking.TrackingReader) -> None:
    for _ in range(2):
        with core.init() as context:
            use_everything(context)
    assert [experiment.state for experiment in records.experiments()] == [tracking.RunState.COMPLETED] * 2


def test_running_trial_is_active(only_trial: OnlyTrial) -> None:
    with core.init() as context:
        context.flush()
        assert only_trial().state is tracking.RunState.ACTIVE


def test_normal_end_is_completed(only_trial: OnlyTrial) -> None:
    with core.init():
        pass
    assert (only_trial().state, only_trial().reason) == (tracking.RunState.COMPLETED, None)


@pytest.mark.parametrize("status", [None, 0])
def test_clean_system_exit_is_completed(status: int | None, only_trial: OnlyTrial) -> None:
    with pytest.raises(SystemExit), core.init():
        raise SystemExit(status)
    assert only_trial().state is tracking.RunState.COMPLETED


def test_failing_system_exit_is_an_error(only_trial: OnlyTrial) -> None:
    with pytest.raises(SystemExit), core.init():
        raise SystemExit(3)
    assert only_trial().state is tracking.RunState.ERROR


def test_exception_is_an_error_with_its_reason(only_trial: OnlyTrial) -> None:
    with pytest.raises(ZeroDivisionError), core.init():
        raise ZeroDivisionError("by nought")
    assert (only_trial().state, only_trial().reason) == (tracking.RunState.ERROR, "ZeroDivisionError: by nought")


def test_exception_goes_on_unchanged() -> None:
    error = ZeroDivisionError("by nought")
    with pytest.raises(ZeroDivisionError) as caught, core.init():
        raise error
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None


def test_keyboard_interrupt_is_canceled(only_trial: OnlyTrial) -> None:
    with pytest.raises(KeyboardInterrupt), core.init():
        raise KeyboardInterrupt
    assert (only_trial().state, only_trial().reason) == (tracking.RunState.CANCELED, "interrupted")


def test_invalid_hp_ends_the_process_with_status_0() -> None:
    with pytest.raises(SystemExit) as caught, core.init():
        raise det.InvalidHP("no such width")
    assert caught.value.code == 0


def test_invalid_hp_is_recorded_as_an_early_exit(only_trial: OnlyTrial) -> None:
    with pytest.raises(SystemExit), core.init():
        raise det.InvalidHP("no such width")
    trial = only_trial()
    assert trial.status == core.EarlyExitReason.INVALID_HP.value
    assert trial.reason is not None
    assert "no such width" in trial.reason


def test_reports_before_an_exception_are_recorded(records: tracking.TrackingReader, only_trial: OnlyTrial) -> None:
    def run() -> None:
        with core.init() as context:
            context.train.report_training_metrics(3, {"loss": 0.5})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert [report.metrics for report in records.metrics(only_trial().id)] == [{"loss": 0.5}]


def test_report_after_the_end_is_refused() -> None:
    with core.init() as context:
        pass
    with pytest.raises(errors.InternalException, match="after the run was closed"):
        context.train.set_status("too late")


def break_home(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Put the home folder where none can be: below a regular file."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("DET_HOME", str(tmp_path / "file" / "home"))


def test_run_that_cannot_be_recorded_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    break_home(monkeypatch, tmp_path)
    with pytest.raises(errors.TrackingException, match="DET_HOME"), core.init():
        pass


def test_run_that_cannot_be_recorded_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    break_home(monkeypatch, tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(errors.TrackingException), core.init():
        pass
    assert our_threads() == []
    assert signal.getsignal(signal.SIGTERM) is handler


def test_recording_failure_does_not_replace_the_programs_own_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    break_home(monkeypatch, tmp_path)
    with pytest.raises(ZeroDivisionError) as caught, core.init():
        raise ZeroDivisionError
    assert "tracking database" in caught.value.__notes__[0]


def test_recording_failure_is_not_hidden_by_invalid_hp(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    break_home(monkeypatch, tmp_path)
    with pytest.raises(errors.TrackingException), core.init():
        raise det.InvalidHP


def test_run_whose_reports_cannot_be_written_says_so_at_its_end() -> None:
    database = pathlib.Path(os.environ["DET_HOME"], "tracking.db")

    def rename(old: str, new: str) -> None:
        connection = sqlite3.connect(database)
        connection.execute(f"ALTER TABLE {old} RENAME TO {new}")
        connection.commit()
        connection.close()

    def run() -> None:
        with core.init() as context:
            context.flush()
            rename("metrics", "aside")
            context.train.report_training_metrics(1, {"loss": 1.0})

    with pytest.raises(errors.TrackingException, match=r"2 reports of this run are not in .*DET_HOME"):
        run()
    rename("aside", "metrics")


def test_reports_that_could_not_be_written_are_written_later(only_trial: OnlyTrial) -> None:
    database = pathlib.Path(os.environ["DET_HOME"], "tracking.db")
    with core.init() as context:
        context.flush()
        blocker = sqlite3.connect(database)
        blocker.execute("ALTER TABLE metrics RENAME TO aside")
        blocker.commit()
        context.train.report_training_metrics(1, {"loss": 1.0})
        context.flush()
        blocker.execute("ALTER TABLE aside RENAME TO metrics")
        blocker.commit()
        blocker.close()
        context.train.report_training_metrics(2, {"loss": 0.5})
    steps = [report.steps_completed for report in tracking.TrackingReader(database).metrics(only_trial().id)]
    assert steps == [1, 2]


@pytest.mark.parametrize("name", ["preempt_mode", "tensorboard_mode"])
def test_mode_of_another_type_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}='AUTO'.*pass one of core\."):
        core.init(**{name: "AUTO"})
    assert our_threads() == []


def test_refused_storage_leaves_no_thread() -> None:
    with pytest.raises(errors.StorageException):
        core.init(checkpoint_storage="s3://")
    assert our_threads() == []


def test_reports_of_a_context_that_is_never_closed_are_recorded(
    run_program: Callable[..., Any], records: tracking.TrackingReader, only_trial: OnlyTrial
) -> None:
    done = run_program(
        "from determined import core\ncontext = core.init()\ncontext.train.report_training_metrics(1, {'loss': 0.25})\n"
    )
    assert done.returncode == 0, done.stderr
    assert [report.metrics for report in records.metrics(only_trial().id)] == [{"loss": 0.25}]
