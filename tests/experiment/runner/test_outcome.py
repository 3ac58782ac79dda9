"""What becomes of a trial when its run has ended."""

from __future__ import annotations

import pytest

from determined.experiment.executors import EndReason, RunExit
from determined.experiment.runner._outcome import StopReason, next_state
from determined.experiment.search import ExitReason
from determined.tracking import RunState

R, S, E = EndReason, RunState, ExitReason


def end(reason: EndReason, **more: object) -> RunExit:
    return RunExit(trial_id=1, run_id=1, reason=reason, message="words", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "stop_reason", "state", "exit"),
    [
        (R.COMPLETED, None, S.COMPLETED, E.COMPLETED),
        (R.COMPLETED, StopReason.PAUSE, S.COMPLETED, E.COMPLETED),
        (R.COMPLETED, StopReason.CANCEL, S.COMPLETED, E.COMPLETED),
        (R.STOPPED, StopReason.SEARCH, S.COMPLETED, E.COMPLETED),
        (R.KILLED, StopReason.SEARCH, S.COMPLETED, E.COMPLETED),
        (R.FAILED, StopReason.SEARCH, S.COMPLETED, E.COMPLETED),
        (R.STOPPED, StopReason.CANCEL, S.CANCELED, E.CANCELED),
        (R.KILLED, StopReason.KILL, S.CANCELED, E.CANCELED),
        (R.STOPPED, StopReason.ERROR, S.ERROR, E.ERROR),
        (R.STOPPED, StopReason.PAUSE, None, None),
        (R.STOPPED, StopReason.YIELD, None, None),
        (R.INVALID_HP, None, S.ERROR, E.INVALID_HP),
        (R.INVALID_HP, StopReason.PAUSE, S.ERROR, E.INVALID_HP),
        (R.NOT_STARTED, None, S.ERROR, E.ERROR),
    ],
)
def test_the_end_and_what_was_asked_for_decide(
    reason: EndReason, stop_reason: StopReason | None, state: RunState | None, exit: ExitReason | None
) -> None:
    outcome = next_state(end(reason), stop_reason, 0, 5, ())
    assert (outcome.state, outcome.exit) == (state, exit)


@pytest.mark.parametrize("stop_reason", [None, StopReason.PAUSE, StopReason.YIELD])
@pytest.mark.parametrize("reason", [R.FAILED, R.KILLED])
def test_a_failure_counts_and_is_tried_again(reason: EndReason, stop_reason: StopReason | None) -> None:
    outcome = next_state(end(reason), stop_reason, 4, 5, ())
    assert (outcome.state, outcome.is_failure) == (None, True)


def test_a_stop_that_nobody_here_asked_for_is_a_failure() -> None:
    assert next_state(end(R.STOPPED), None, 0, 5, ()).is_failure


def test_a_run_that_lost_its_runner_is_no_failure() -> None:
    outcome = next_state(end(R.STOPPED, runner_gone=True), None, 5, 5, ())
    assert (outcome.state, outcome.is_failure) == (None, False)


def test_too_many_failures_are_an_error_with_the_last_words() -> None:
    outcome = next_state(end(R.FAILED), None, 5, 5, ())
    assert outcome.state is S.ERROR
    assert outcome.reason == "words (after 5 restarts)"


def test_a_log_policy_makes_a_failure_final() -> None:
    failed = end(R.FAILED, matches={"CUDA out of memory": "CUDA out of memory. Tried"})
    assert next_state(failed, None, 0, 5, {"CUDA out of memory"}).state is S.ERROR
    assert next_state(failed, None, 0, 5, {"another"}).state is None


@pytest.mark.parametrize("stop_reason", [stop_reason for stop_reason in StopReason if stop_reason.is_for_good])
def test_the_state_of_a_stopping_trial_tells_why_it_stops(stop_reason: StopReason) -> None:
    assert StopReason.of_state(stop_reason.stopping_state) is stop_reason
    assert StopReason.of_state(RunState.ACTIVE) is None
