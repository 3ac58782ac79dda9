"""Scripts as runs: how they are started, and how their ends are told."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import stat
import sys
import time

import pytest
from executor_runs import Runs, environment

from determined import errors, tracking
from determined.experiment.executors import EndReason, LocalExecutor

pytestmark = pytest.mark.process

SHOW = f"{sys.executable} -c 'import os, json; print(json.dumps(dict(os.environ)))'"


def test_text_is_for_the_shell_in_the_code_folder(runs: Runs) -> None:
    runs.write("hello", "file.txt")
    spec = runs.spec("pwd && cat file.txt | tr a-z A-Z")
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert runs.text(spec).split() == [str(runs.code), "HELLO"]


def test_list_is_a_program_and_its_arguments(runs: Runs) -> None:
    spec = runs.spec(["printf", "%s.", "a b", "$HOME"])
    assert runs.run(spec).status == 0
    assert runs.text(spec) == "a b.$HOME.\n"


def test_program_of_the_code_folder_can_be_run(runs: Runs) -> None:
    runs.write("#!/bin/sh\necho it runs", "run.sh")
    (runs.code / "run.sh").chmod(0o755)
    spec = runs.spec(["./run.sh"])
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert runs.text(spec) == "it runs\n"


def test_exit_status_is_told(runs: Runs) -> None:
    ended = runs.run(runs.spec("echo first >&2; echo why >&2; exit 3"))
    assert (ended.reason, ended.status, ended.message) == (EndReason.FAILED, 3, "why")
    assert ended.last_lines == ("first", "why")


def test_times_of_the_run_are_told(runs: Runs) -> None:
    before = time.time()
    ended = runs.run(runs.spec("true"))
    assert before <= ended.started <= ended.ended <= time.time()


def test_message_of_a_failed_program_is_what_its_traceback_ends_with(runs: Runs) -> None:
    program = "import sys; sys.stderr.write('noise\\n'); e = ValueError('too\\nlong'); e.add_note('note'); raise e"
    ended = runs.run(runs.spec([sys.executable, "-c", program]))
    assert ended.message == "ValueError: too"


def test_message_of_a_program_that_lacks_a_package_of_determined_says_how_to_install_it(runs: Runs) -> None:
    ended = runs.run(runs.spec([sys.executable, "-c", "import boto3.no_such"]))
    assert "pip install 'resolute[determined]'" in ended.message


def test_message_of_a_failed_program_has_the_indented_lines_of_its_exception(runs: Runs) -> None:
    program = "raise ValueError('two problems:\\n  a is missing\\n\\tb is too long\\nThe end.')"
    ended = runs.run(runs.spec([sys.executable, "-c", program]))
    assert ended.message == "ValueError: two problems:\n  a is missing\n\tb is too long"


def test_program_killed_by_somebody_else_has_failed(runs: Runs) -> None:
    ended = runs.run(runs.spec("echo noise >&2; kill -9 $$"))
    assert (ended.reason, ended.status) == (EndReason.FAILED, 137)
    assert "killed by SIGKILL" in ended.message


def test_stop_by_somebody_else_is_a_failure_to_start_again_from(runs: Runs) -> None:
    ended = runs.run(runs.spec("exit 143"))
    assert (ended.reason, ended.status) == (EndReason.FAILED, 143)
    assert "by somebody else" in ended.message


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        (["no-such-program"], "'no-such-program' cannot be run: No such file or directory."),
        (["./plain.sh"], "Permission denied; make it executable with chmod +x"),
        (["plain.sh"], "No such file or directory; write ./plain.sh for the one in the code folder."),
        (["./binary"], "Exec format error; begin it with #!"),
        (["./lost"], "its #! names no program here"),
        (["printf", "a\0b"], "embedded null byte"),
    ],
)
def test_what_cannot_be_run_is_not_started(entrypoint: list[str], said: str, runs: Runs) -> None:
    runs.write("echo", "plain.sh")
    runs.write("\1", "binary")
    runs.write("#!/no/interpreter", "lost")
    for name in ("binary", "lost"):
        (runs.code / name).chmod(0o755)
    spec = runs.spec(entrypoint)
    ended = runs.run(spec)
    assert ended.reason is EndReason.NOT_STARTED
    assert said in ended.message
    assert said in runs.text(spec)


def test_missing_code_folder_is_named(runs: Runs) -> None:
    ended = runs.run(runs.spec("true", code=runs.folder / "gone"))
    assert ended.reason is EndReason.NOT_STARTED
    assert str(runs.folder / "gone") in ended.message


def test_folder_that_cannot_be_made_is_named(runs: Runs) -> None:
    (runs.folder / "trial-1").write_text("in the way")
    ended = runs.run(runs.spec("true"))
    assert ended.reason is EndReason.NOT_STARTED
    assert "trial-1" in ended.message


def test_environment_is_that_of_the_executor_and_of_the_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATER", "than the executor")
    spec = runs.spec(SHOW, environment={"DET_X": "1", "OWN": "2"}, placement={"threads": 3})
    runs.run(spec)
    variables = json.loads(runs.text(spec))
    assert (variables["DET_X"], variables["OWN"], variables["DET_PROGRESS"]) == ("1", "2", "0")
    assert variables["DET_RUN_FOLDER"] == str(spec.folder)
    assert variables["OMP_NUM_THREADS"] == variables["MKL_NUM_THREADS"] == variables["OPENBLAS_NUM_THREADS"] == "3"
    assert not {"LATER", "DET_FORKSERVER", "RANK"} & variables.keys()


def test_variables_of_a_training_that_the_runner_is_part_of_stay_out(own_runs: Runs) -> None:
    theirs = {"RANK": "1", "TORCHELASTIC_RUN_ID": "x", "DET_TRIAL_ID": "3", "DET_LATEST_CHECKPOINT": "c"}
    with LocalExecutor({**environment(own_runs.folder), **theirs, "OTHER": "1"}) as executor:
        own_runs.executor = executor
        spec = own_runs.spec(SHOW)
        own_runs.run(spec)
    variables = json.loads(own_runs.text(spec))
    assert not theirs.keys() & variables.keys()
    assert variables["OTHER"] == "1"


def test_relative_home_folder_is_that_of_the_runner(
    own_runs: Runs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with LocalExecutor({**environment(own_runs.folder), "DET_HOME": "records"}) as executor:
        own_runs.executor = executor
        spec = own_runs.spec("echo $DET_HOME")
        del spec.environment["DET_HOME"]
        own_runs.run(spec)
    assert own_runs.text(spec) == f"{tmp_path / 'records'}\n"


@pytest.mark.parametrize(("gpus", "shown"), [([], ""), (["2"], "2"), (["0", "GPU-3"], "0,GPU-3")])
def test_run_sees_its_gpus_only(gpus: list[str], shown: str, runs: Runs) -> None:
    spec = runs.spec(
        "echo [$CUDA_VISIBLE_DEVICES]", placement={"gpus": gpus}, environment={"CUDA_VISIBLE_DEVICES": "7"}
    )
    runs.run(spec)
    assert runs.text(spec) == f"[{shown}]\n"


def test_nothing_can_be_read_from_the_terminal(runs: Runs) -> None:
    spec = runs.spec("cat; echo end")
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert runs.text(spec) == "end\n"


def test_script_has_nothing_open_but_its_output(runs: Runs) -> None:
    spec = runs.spec([sys.executable, "-c", "import os; print(os.listdir('/proc/self/fd'))"])
    runs.run(spec)
    assert runs.text(spec) == "['0', '1', '2', '3']\n"  # the last is of the listing itself


def test_script_that_signals_its_group_hits_itself_alone(runs: Runs) -> None:
    ended = runs.run(runs.spec("kill -KILL 0"))
    assert (ended.reason, ended.status) == (EndReason.FAILED, 137)


def test_large_environment_goes_through(runs: Runs) -> None:
    large = {f"DET_LARGE_{number}": "x" * 100_000 for number in range(8)}
    spec = runs.spec("echo ${#DET_LARGE_7}", environment=large)
    runs.run(spec)
    assert runs.text(spec) == "100000\n"


def test_end_is_in_a_file_that_only_its_owner_writes(runs: Runs) -> None:
    spec = runs.spec("exit 4")
    ended = runs.run(spec)
    written = json.loads(spec.files.exit.read_text())
    assert (written["status"], written["reason"]) == (4, "FAILED")
    runs.executor.adopt(spec)
    assert runs.executor.poll(0.0) == [ended]
    assert not stat.S_IMODE(spec.files.exit.stat().st_mode) & stat.S_IWOTH
    assert sorted(path.name for path in spec.folder.iterdir()) == ["exit.json", "rank-0.log", "shim.json"]


def test_waiting_ends_when_nothing_runs(own_runs: Runs) -> None:
    assert own_runs.executor.poll(None) == []


def test_handle_of_a_run_names_its_shim(runs: Runs) -> None:
    spec = runs.start(runs.spec("echo up; read line < /dev/zero"))
    runs.await_text(spec, "up")
    handle = runs.executor.handle(spec.trial_id)
    assert handle is not None
    process = tracking.RunProcess.from_json(handle)
    assert process.pid == runs.shim(spec).pid
    assert not process.is_gone
    runs.executor.kill(spec.trial_id)
    runs.end(spec)
    assert runs.executor.handle(spec.trial_id) is None


def test_trial_has_one_run_at_a_time(runs: Runs) -> None:
    spec = runs.start(runs.spec("sleep 60"))
    with pytest.raises(errors.MisuseError, match=f"Trial {spec.trial_id} has a run already"):
        runs.executor.start(spec)
    runs.executor.kill(spec.trial_id)
    runs.end(spec)


def test_orders_for_a_trial_without_a_run_are_passed_over(runs: Runs) -> None:
    runs.executor.stop(12345)
    runs.executor.kill(12345)


def test_forkserver_that_cannot_start_is_told(own_runs: Runs) -> None:
    ended = own_runs.run(own_runs.spec("true", environment={"PYTHONHOME": "/nonexistent"}))
    assert ended.reason is EndReason.NOT_STARTED
    assert "Python" in ended.message


def test_invalid_hyperparameters_of_a_core_script(runs: Runs) -> None:
    runs.write(
        """
        import determined as det
        from determined import core
        with core.init() as context:
            raise det.InvalidHP("lr is too large")
        """,
        "train.py",
    )
    ended = runs.run(runs.trial(f"{sys.executable} train.py"))
    assert (ended.reason, ended.status, ended.message) == (EndReason.INVALID_HP, 0, "lr is too large")


def test_invalid_hyperparameters_that_a_script_reports(runs: Runs) -> None:
    runs.write(
        """
        from determined import core
        with core.init() as context:
            context.train.report_early_exit(core.EarlyExitReason.INVALID_HP)
        """,
        "train.py",
    )
    assert runs.run(runs.trial(f"{sys.executable} train.py")).reason is EndReason.INVALID_HP


def test_pattern_in_the_output_is_noted_with_its_first_line(runs: Runs) -> None:
    spec = runs.spec("echo a CUDA error 7; echo b CUDA error 8 >&2", patterns=["CUDA error .", "never", "^b"])
    assert runs.run(spec).matches == {"CUDA error .": "a CUDA error 7", "^b": "b CUDA error 8"}


def test_pattern_that_takes_for_ever_is_given_up(runs: Runs) -> None:
    spec = runs.spec(f"echo {'a' * 60}b; echo fine", patterns=["(a+)+$", "fine"])
    ended = runs.run(spec)
    assert (ended.reason, list(ended.matches)) == (EndReason.COMPLETED, ["fine"])
    assert "'(a+)+$' has no effect: it took more than" in runs.text(spec)


def test_pattern_that_is_given_up_when_the_run_is_over_is_named_too(runs: Runs) -> None:
    go = runs.folder / "go"
    script = f"printf {'a' * 60}b; echo up >&2; until [ -e {go} ]; do sleep 0.01; done"
    spec = runs.start(runs.spec(script, patterns=["(a+)+$"]))
    runs.await_text(spec, "up")
    # As long as somebody could go on writing it, a line without an end is whole only when the run is over.
    with pathlib.Path(f"/proc/{runs.rank(spec).pid}/fd/1").open("wb"):
        go.touch()
        runs.end(spec)
    assert "'(a+)+$' has no effect: it took more than" in runs.text(spec)


def test_what_the_shim_says_is_not_the_output_of_the_trial(runs: Runs) -> None:
    ended = runs.run(runs.spec("echo a disk is full >&2; exit 3", patterns=["(", "log policy"]))
    assert (ended.matches, ended.last_lines) == ({}, ("a disk is full",))


def test_pattern_that_is_none_is_named_in_the_log(runs: Runs) -> None:
    spec = runs.spec("true", patterns=["("])
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert "the pattern '(' has no effect: it is not a regular expression" in runs.text(spec)


def test_closing_stops_what_runs(own_runs: Runs) -> None:
    spec = own_runs.start(own_runs.spec("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.01; done"))
    own_runs.await_text(spec, "up")
    own_runs.executor.close()
    own_runs.going.clear()
    with LocalExecutor() as later:
        later.adopt(spec)
        (ended,) = later.poll(60)
    assert (ended.reason, ended.runner_gone) == (EndReason.STOPPED, True)
    assert "saved" in own_runs.text(spec)


def test_signal_to_the_shim_stops_the_run(runs: Runs) -> None:
    spec = runs.start(runs.spec("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.01; done"))
    runs.await_text(spec, "up")
    os.kill(runs.shim(spec).pid, signal.SIGTERM)
    assert runs.end(spec).reason is EndReason.STOPPED
    assert "saved" in runs.text(spec)
