"""Runs within this process."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator

import pytest
from executor_runs import TRIAL, Runs

from determined import errors
from determined.experiment.executors import EndReason, InlineExecutor, RunExit, RunSpec


@pytest.fixture
def runs(tmp_path: pathlib.Path) -> Iterator[Runs]:
    executor = InlineExecutor()
    yield Runs(tmp_path, executor)  # type: ignore[arg-type]
    executor.close()


def run(runs: Runs, spec: RunSpec) -> RunExit:
    runs.executor.start(spec)
    (ended,) = runs.executor.poll(None)
    return ended


def test_trial_is_trained_in_this_process(runs: Runs) -> None:
    runs.write(TRIAL + "\nimport sys, os; sys.process_of_the_trial = os.getpid()")
    spec = runs.trial()
    assert run(runs, spec).reason is EndReason.COMPLETED
    assert vars(sys).pop("process_of_the_trial") == os.getpid()
    assert [report.steps_completed for report in runs.records().metrics(spec.trial_id, "validation")] == [2]


def test_process_is_as_before(runs: Runs) -> None:
    runs.write(TRIAL)
    main = vars(sys.modules["__main__"])
    before = dict(os.environ), os.getcwd(), list(sys.argv), list(sys.path), main.get("__file__")
    run(runs, runs.trial())
    assert (dict(os.environ), os.getcwd(), list(sys.argv), list(sys.path), main.get("__file__")) == before
    assert "model_def" not in sys.modules


def test_each_run_imports_its_own_program(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("first", "second"):
        runs.write(f"{TRIAL}\nprint('it is the {text}')")
        run(runs, runs.trial())
    shown = capsys.readouterr().out
    assert "it is the first" in shown
    assert "it is the second" in shown


def test_failure_is_told(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write(f"{TRIAL}\nclass Fails(Trial):\n    def begin(self):\n        raise ValueError('too wide')")
    ended = run(runs, runs.trial("model_def:Fails"))
    assert (ended.reason, ended.status, ended.message) == (EndReason.FAILED, 1, "ValueError: too wide")
    assert "Traceback" in capsys.readouterr().err


def test_invalid_hyperparameters(runs: Runs) -> None:
    runs.write(f"{TRIAL}\nclass Gives(Trial):\n    def begin(self):\n        raise det.InvalidHP('no such width')")
    ended = run(runs, runs.trial("model_def:Gives"))
    assert (ended.reason, ended.message) == (EndReason.INVALID_HP, "no such width")


def test_class_that_is_not_there_is_not_started(runs: Runs) -> None:
    runs.write(TRIAL)
    ended = run(runs, runs.trial("model_def:Trail"))
    assert ended.reason is EndReason.NOT_STARTED
    assert "there is no 'Trail'" in ended.message


@pytest.mark.parametrize(("entrypoint", "ranks"), [("python train.py", 1), (["train"], 1), ("model_def:Trial", 2)])
def test_what_needs_processes_is_not_started(entrypoint: object, ranks: int, runs: Runs) -> None:
    ended = run(runs, runs.spec(entrypoint, ranks=ranks))
    assert ended.reason is EndReason.NOT_STARTED
    assert "cannot run within one process" in ended.message


def adopted(runs: Runs, spec: RunSpec) -> RunExit:
    runs.executor.adopt(spec)
    (ended,) = runs.executor.poll(0.0)
    return ended


def test_end_is_kept_for_a_later_process(runs: Runs) -> None:
    runs.write(TRIAL)
    spec = runs.trial()
    assert adopted(runs, spec).reason is EndReason.KILLED
    ended = run(runs, spec)
    assert adopted(runs, spec) == ended


@pytest.mark.parametrize(("order", "reason"), [("stop", EndReason.STOPPED), ("kill", EndReason.KILLED)])
def test_run_in_the_line_can_be_taken_out(order: str, reason: EndReason, runs: Runs) -> None:
    spec = runs.spec("model_def:Trial")
    runs.executor.start(spec)
    getattr(runs.executor, order)(spec.trial_id)
    getattr(runs.executor, order)(spec.trial_id)  # now there is none
    assert [ended.reason for ended in runs.executor.poll(None)] == [reason]


def test_trial_has_one_run_at_a_time(runs: Runs) -> None:
    spec = runs.spec("model_def:Trial")
    runs.executor.start(spec)
    with pytest.raises(errors.MisuseError, match="has a run already"):
        runs.executor.start(spec)


def test_handle_of_a_run_names_this_process(runs: Runs) -> None:
    spec = runs.spec("model_def:Trial")
    assert runs.executor.handle(spec.trial_id) is None
    runs.executor.start(spec)
    handle = runs.executor.handle(spec.trial_id)
    assert handle is not None
    assert handle["pid"] == os.getpid()
