"""Checkpoints are written while training goes on, and hold what was there when they were made."""

from __future__ import annotations

import errno
import io
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from determined import pytorch
from determined.errors import StorageException
from determined.pytorch import Batch
from saving import trial_with
from trials import LineTrial, assert_same, fit, records, saved_at, state_in

A_MOMENT = 0.3
"""Seconds in which something that must not happen would."""

TOO_LONG = 30.0

Write = Callable[[Any, Any], None]


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, Write], None]], list[threading.Thread]]:
    """Have a function called for the n-th write of a state to the disk, with what writes it; gives the threads."""
    save = torch.save

    def install(instead: Callable[[int, Write], None]) -> list[threading.Thread]:
        threads: list[threading.Thread] = []

        def torch_save(value: Any, file: Any) -> None:
            if isinstance(file, io.BytesIO):  # a check, not a checkpoint
                return save(value, file)
            threads.append(threading.current_thread())
            return instead(len(threads), lambda: save(value, file))

        monkeypatch.setattr(torch, "save", torch_save)
        return threads

    return install


def checkpoint_at(batches: int, trial_id: int = 1) -> pathlib.Path:
    (found,) = [one for one in records().checkpoints(trial_id=trial_id) if one.steps_completed == batches]
    return pathlib.Path(found.path)


def trial_that(act: Callable[[Any, int], None]) -> type[LineTrial]:
    """Returns a trial that does something before each batch."""

    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            act(self, batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)

    return Trial


# The loop


def test_training_goes_on_while_a_checkpoint_is_written(writing: Any) -> None:
    trained_on = threading.Event()

    def write_later(number: int, write: Write) -> None:
        assert trained_on.wait(TOO_LONG)
        write()

    writing(write_later)
    fit(
        trial_that(lambda _, batch_idx: trained_on.set() if batch_idx == 4 else None),
        max_length=Batch(5),
        checkpoint_period=Batch([2]),
    )
    assert saved_at() == [2, 5]


def test_checkpoint_holds_the_state_at_the_time_of_saving(writing: Any) -> None:
    trained_on = threading.Event()

    def write_later(number: int, write: Write) -> None:
        assert trained_on.wait(TOO_LONG)
        write()

    callback = pytorch.PyTorchCallback()
    threads = writing(write_later)
    beside = trial_with(callback, trial_that(lambda _, idx: trained_on.set() if idx == 4 else None))
    fit(beside, max_length=Batch(5), checkpoint_period=Batch([2]))
    callback = type("Waiting", (pytorch.PyTorchCallback,), {"on_checkpoint_write_end": lambda self, folder: None})()
    fit(trial_with(callback), max_length=Batch(5), checkpoint_period=Batch([2]))
    assert [thread is threading.main_thread() for thread in threads] == [False, False, True, True]
    assert_same(state_in(checkpoint_at(2, trial_id=1)), state_in(checkpoint_at(2, trial_id=2)))
    assert_same(state_in(checkpoint_at(5, trial_id=1)), state_in(checkpoint_at(5, trial_id=2)))


def test_next_checkpoint_waits_for_the_one_before(writing: Any) -> None:
    snapshots: list[int] = []
    second = threading.Event()
    overlaps: list[bool] = []

    class Callback(pytorch.PyTorchCallback):
        def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
            snapshots.append(len(snapshots))
            if len(snapshots) == 2:
                second.set()

    def write_slowly(number: int, write: Write) -> None:
        if number == 1:
            overlaps.append(second.wait(A_MOMENT))
        write()

    writing(write_slowly)
    fit(trial_with(Callback()), max_length=Batch(2), checkpoint_period=Batch(1))
    assert overlaps == [False]
    assert len(snapshots) == 2


@pytest.mark.parametrize("stop", [False, True], ids=["end", "stop"])
def test_fit_returns_when_its_last_checkpoint_is_complete(stop: bool, writing: Any) -> None:
    returned = threading.Event()
    overlaps: list[bool] = []

    def write_slowly(number: int, write: Write) -> None:
        overlaps.append(returned.wait(A_MOMENT))
        write()

    writing(write_slowly)
    fit(
        trial_that(lambda trial, idx: trial.context.set_stop_requested(stop and idx == 1)),
        max_length=Batch(2 if not stop else 50),
    )
    returned.set()
    assert overlaps == [False]
    assert saved_at() == [2]


def test_error_of_the_program_leaves_the_checkpoint_that_is_being_written(writing: Any) -> None:
    raised = threading.Event()

    def write_later(number: int, write: Write) -> None:
        assert raised.wait(TOO_LONG)
        write()

    def fail(trial: LineTrial, batch_idx: int) -> None:
        if batch_idx == 3:
            raised.set()
            raise ZeroDivisionError

    writing(write_later)
    with pytest.raises(ZeroDivisionError):
        fit(trial_that(fail), checkpoint_period=Batch(2))
    assert saved_at() == [2]
    assert fit(latest_checkpoint=checkpoint_at(2)).seen[0] == (0, 2)


# Writes that fail


def no_room_for(number: int) -> Callable[[int, Write], None]:
    def write(current: int, write: Write) -> None:
        if current == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write()

    return write


def test_failed_write_ends_training_naming_folder_reason_and_what_is_safe(writing: Any) -> None:
    writing(no_room_for(2))
    trials: list[LineTrial] = []
    with pytest.raises(StorageException) as caught:
        fit(
            trial_that(lambda trial, _: trials.append(trial)),
            max_length=Batch(100),
            checkpoint_period=Batch(2),
        )
    message = str(caught.value)
    assert message.startswith("The checkpoint of batch 4 is not saved. ")
    assert f"{os.environ['DET_HOME']}/checkpoints/" in message
    assert "No space left on device" in message
    assert message.endswith(f"The last good checkpoint is {checkpoint_at(2).name}.")
    assert len(trials) <= 6  # at the next checkpoint at the latest


def test_failed_write_leaves_the_checkpoint_before_and_nothing_else(writing: Any) -> None:
    writing(no_room_for(2))
    with pytest.raises(StorageException):
        fit(checkpoint_period=Batch(2))
    assert saved_at() == [2]
    assert list(checkpoint_at(2).parent.iterdir()) == [checkpoint_at(2)]
    assert fit(latest_checkpoint=checkpoint_at(2)).seen[0] == (0, 2)


def test_first_write_that_fails_says_that_there_is_none_before(writing: Any) -> None:
    writing(no_room_for(1))
    with pytest.raises(StorageException, match=r"The checkpoint of batch 6 .*There is none before it\.$"):
        fit()
    assert saved_at() == []


def test_after_a_resume_the_checkpoint_that_was_loaded_is_what_is_safe(writing: Any) -> None:
    fit(max_length=Batch(2))
    writing(no_room_for(1))
    with pytest.raises(StorageException, match=f"The last good checkpoint is {checkpoint_at(2).name}"):
        fit(latest_checkpoint=checkpoint_at(2))


# Callbacks


@pytest.mark.parametrize("hook", ["on_checkpoint_write_end", "on_checkpoint_end", "on_checkpoint_upload_end"])
@pytest.mark.filterwarnings("ignore:.*on_checkpoint_end:DeprecationWarning", "ignore:.*on_checkpoint_end:FutureWarning")
def test_callback_that_comes_after_the_write_makes_saving_synchronous(hook: str, writing: Any) -> None:
    threads = writing(lambda number, write: write())
    callback = type("Callback", (pytorch.PyTorchCallback,), {hook: lambda self, folder: None})()
    fit(trial_with(callback), max_length=Batch(2), checkpoint_period=Batch(1))
    assert threads == [threading.main_thread()] * 2


def test_callbacks_hear_of_each_complete_checkpoint_at_its_batch_on_the_training_thread() -> None:
    trained: list[int] = []
    heard: list[tuple[str, int, threading.Thread]] = []

    class Callback(pytorch.PyTorchCallback):
        def on_checkpoint_upload_end(self, uuid: str) -> None:
            assert pathlib.Path(os.environ["DET_HOME"], "checkpoints", uuid, "manifest.json").is_file()
            heard.append((uuid, len(trained), threading.current_thread()))

    base = trial_that(lambda _, batch_idx: trained.append(batch_idx))
    fit(trial_with(Callback(), base), max_length=Batch(5), checkpoint_period=Batch(2))
    assert heard == [(checkpoint_at(n).name, n, threading.main_thread()) for n in (2, 4, 5)]


def test_what_a_callback_keeps_of_the_state_may_change_later() -> None:
    kept: list[dict[str, Any]] = []

    class Callback(pytorch.PyTorchCallback):
        def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"numbers": [1, 2]}
            kept.append(checkpoint)

        def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
            for state in kept:
                state["mine"]["numbers"].append(3)

    fit(trial_with(Callback()), max_length=Batch(3), checkpoint_period=Batch(1))
    assert [state_in(checkpoint_at(n))["mine"] for n in (1, 2, 3)] == [{"numbers": [1, 2]}] * 3
