"""What `fit` does when: periods, ends and stops."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import trials
from determined import pytorch, tracking
from determined.pytorch import Batch, Epoch
from trials import LineTrial, fit, latest_checkpoint, records, saved_at, steps_of


def test_periods_place_validations_checkpoints_and_reports() -> None:
    fit(
        max_length=Batch(7),
        validation_period=Batch(3),
        checkpoint_period=Batch(2),
        reporting_period=Batch(5),
    )
    assert steps_of("validation") == [3, 6, 7]
    assert saved_at() == [2, 4, 6, 7]
    assert steps_of("training") == [2, 3, 4, 5, 6, 7], "a window ends whenever anything is due"


def test_schedules_place_exact_points() -> None:
    fit(max_length=Batch(6), validation_period=Batch([1, 4]), checkpoint_period=Batch(2, 5))
    assert steps_of("validation") == [1, 4, 6]
    assert saved_at() == [2, 5, 6]


def test_epoch_periods_count_passes_over_the_data() -> None:
    fit(max_length=Epoch(3), validation_period=Epoch(2), checkpoint_period=Epoch([1]))
    assert steps_of("validation") == [12, 18]
    assert saved_at() == [6, 18]


def test_units_can_be_mixed() -> None:
    fit(max_length=Batch(8), validation_period=Epoch(1))
    assert steps_of("validation") == [6, 8]


def test_without_periods_all_comes_after_the_last_batch() -> None:
    fit(max_length=Batch(3))
    assert (steps_of("training"), steps_of("validation"), saved_at()) == ([3], [3], [3])


def test_nothing_is_done_twice_at_the_last_batch() -> None:
    fit(max_length=Batch(4), validation_period=Batch(2), checkpoint_period=Batch(4), checkpoint_policy="all")
    assert (steps_of("validation"), saved_at()) == ([2, 4], [2, 4])


def test_a_period_below_one_acts_on_every_batch() -> None:
    fit(max_length=Batch(3), validation_period=Batch(0))
    assert steps_of("validation") == [1, 2, 3]


def test_batch_and_epoch_indices_count_from_the_start_of_training() -> None:
    assert fit(max_length=Batch(8)).seen == [(i // 6, i) for i in range(8)]


def test_periods_of_a_resumed_run_count_from_the_start_of_training() -> None:
    fit(max_length=Batch(4))
    trial = fit(max_length=Batch(10), latest_checkpoint=latest_checkpoint(), validation_period=Batch(3))
    assert steps_of("validation", 2) == [6, 9, 10]
    assert trial.seen[0] == (0, 4)
    assert trial.seen[-1] == (1, 9)


def test_a_resumed_run_that_is_trained_already_adds_nothing() -> None:
    fit(max_length=Batch(4))
    trial = fit(max_length=Batch(4), latest_checkpoint=latest_checkpoint())
    assert trial.seen == []
    assert (steps_of("validation", 2), saved_at(2)) == ([], [])


def test_step_zero_validation_is_reported_as_step_zero() -> None:
    fit(max_length=Batch(2), step_zero_validation=True)
    assert steps_of("validation") == [0, 2]


def test_test_mode_trains_and_validates_one_batch_and_saves_once() -> None:
    class Counted(LineTrial):
        evaluated = 0

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.evaluated += 1
            return super().evaluate_batch(batch, batch_idx)

    trial = fit(Counted, max_length=Batch(50), test_mode=True, checkpoint_policy="best", validation_period=Batch(1))
    assert (len(trial.seen), trial.evaluated, saved_at()) == (1, 1, [1])


def test_error_after_the_batch_of_test_mode_says_that_there_was_only_one() -> None:
    class Varied(LineTrial):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"spread": statistics.stdev([batch_idx])}

    with pytest.raises(statistics.StatisticsError) as caught:
        fit(Varied, max_length=Batch(50), test_mode=True)
    (note,) = caught.value.__notes__
    assert "one batch only" in note


def test_error_in_the_batch_of_test_mode_has_no_note() -> None:
    class Broken(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fit(Broken, max_length=Batch(50), test_mode=True)
    assert not hasattr(caught.value, "__notes__")


def test_test_mode_needs_no_length() -> None:
    assert len(fit(max_length=None, test_mode=True).seen) == 1


def test_test_mode_trains_one_batch_more_from_a_checkpoint() -> None:
    fit(max_length=Batch(3))
    assert fit(latest_checkpoint=latest_checkpoint(), test_mode=True).seen == [(0, 3)]


def test_a_stop_request_is_answered_once() -> None:
    class StopsOnce(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if not self.seen:
                self.context.set_stop_requested(True)
            return super().train_batch(batch, epoch_idx, batch_idx)

    with trials.trainer(StopsOnce) as (trainer, trial):
        trainer.fit(max_length=Batch(2), checkpoint_policy="none")
        trainer.fit(max_length=Batch(2), checkpoint_policy="none")
    assert trial.seen == [(0, 0), (0, 0), (0, 1)]


def test_fit_twice_trains_twice_in_one_record() -> None:
    with trials.trainer() as (trainer, trial):
        trainer.fit(max_length=Batch(2), checkpoint_policy="none")
        trainer.fit(max_length=Batch(3), checkpoint_policy="none")
    assert trial.seen == [(0, 0), (0, 1), (0, 0), (0, 1), (0, 2)]
    assert saved_at() == [2, 3]


def test_data_without_a_length_trains_in_batches() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from trials.line_data(8)

    class Trial(LineTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Endless(), batch_size=4)

    trial = fit(Trial, max_length=Batch(5))
    assert [batch for _, batch in trial.seen] == list(range(5))


# Stopping


def test_stop_request_stops_after_that_batch_and_saves() -> None:
    class Stopping(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.context.set_stop_requested(batch_idx == 2)
            return super().train_batch(batch, epoch_idx, batch_idx)

    assert len(fit(Stopping, max_length=Batch(100)).seen) == 3
    assert (saved_at(), steps_of("training"), steps_of("validation")) == ([3], [3], [])
    assert records().experiment(1).state is tracking.RunState.COMPLETED


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_after_the_batch_saves_and_ends_the_process_as_shells_expect(signum: signal.Signals) -> None:
    seen = []

    class Signalled(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 1:
                os.kill(os.getpid(), signum)
            seen.append(batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytest.raises(SystemExit) as caught:
        fit(Signalled, max_length=Batch(100))
    assert caught.value.code == 128 + signum
    assert (seen, saved_at()) == ([0, 1], [2])
    assert records().experiment(1).state is tracking.RunState.CANCELED


def test_signal_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    fit(max_length=Batch(1))
    assert signal.getsignal(signal.SIGTERM) is before


def test_error_is_recorded() -> None:
    class Failing(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            raise ZeroDivisionError("by nothing")

    with pytest.raises(ZeroDivisionError):
        fit(Failing)
    (trial,) = records().trials(1)
    assert (trial.state, trial.reason) == (tracking.RunState.ERROR, "ZeroDivisionError: by nothing")


class Failing(pytorch.PyTorchCallback):
    """Fails in its shutdown, and notes that it was called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.was_shut_down = False

    def on_trial_shutdown(self) -> None:
        self.was_shut_down = True
        raise OSError(f"shutdown of {self.name}")


@pytest.mark.parametrize("error", [ZeroDivisionError("in training"), KeyboardInterrupt("at the terminal")])
def test_shutdown_that_fails_hides_no_earlier_error_and_no_other_shutdown(error: BaseException) -> None:
    callbacks = [Failing("a"), Failing("b")]

    class Trial(LineTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {callback.name: callback for callback in callbacks}

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            raise error

    with pytest.raises(type(error)) as caught:
        fit(Trial)
    assert caught.value is error
    assert [note for note in error.__notes__ if "OSError" in note] == [
        "on_trial_shutdown() failed too: OSError: shutdown of a",
        "on_trial_shutdown() failed too: OSError: shutdown of b",
    ]
    assert all(callback.was_shut_down for callback in callbacks)


def test_shutdown_that_fails_after_a_training_is_the_error() -> None:
    callbacks = [Failing("a"), Failing("b")]

    class Trial(LineTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {callback.name: callback for callback in callbacks}

    with pytest.raises(OSError, match="shutdown of a") as caught:
        fit(Trial)
    assert "shutdown of b" in caught.value.__notes__[0]
    assert saved_at() == [6]


@pytest.mark.parametrize("skip", [False, True])
def test_should_exit_before_the_first_batch_leaves_fit_cleanly(skip: bool) -> None:
    class Leave(pytorch.PyTorchCallback):
        def on_training_start(self) -> None:
            raise pytorch.ShouldExit(skip_exit_checkpoint=skip)

    class Trial(LineTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"leave": Leave()}

    assert fit(Trial).seen == []
    assert saved_at() == ([] if skip else [0])
    assert records().trial(1).state is tracking.RunState.COMPLETED


def test_checkpoint_of_the_environment_is_for_the_first_fit_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(LineTrial, max_length=Batch(4))
    monkeypatch.setenv("DET_LATEST_CHECKPOINT", latest_checkpoint())
    first, second = fit(LineTrial), fit(LineTrial)
    assert (len(first.seen), len(second.seen)) == (2, 6)
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.endswith(f"continue: fit(latest_checkpoint={latest_checkpoint()!r})")
