"""Checkpoints are written while training goes on, and hold what was there when they were made."""

from __future__ import annotations

import collections
import copy
import errno
import io
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from determined import pytorch
from determined.errors import StorageException
from determined.pytorch import Batch
from determined.pytorch._snapshot import HostCopier
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


@pytest.mark.parametrize("hook", ["on_checkpoint_write_end", "on_checkpoint_end"])
@pytest.mark.filterwarnings("ignore:.*on_checkpoint_end:DeprecationWarning", "ignore:.*on_checkpoint_end:FutureWarning")
def test_callback_that_needs_the_folder_makes_saving_synchronous(hook: str, writing: Any) -> None:
    threads = writing(lambda number, write: write())
    callback = type("Callback", (pytorch.PyTorchCallback,), {hook: lambda self, folder: None})()
    fit(trial_with(callback), max_length=Batch(2), checkpoint_period=Batch(1))
    assert threads == [threading.main_thread()] * 2


def test_callbacks_hear_of_each_complete_checkpoint_once_in_order_on_the_training_thread() -> None:
    heard: list[tuple[str, threading.Thread]] = []

    class Callback(pytorch.PyTorchCallback):
        def on_checkpoint_upload_end(self, uuid: str) -> None:
            assert pathlib.Path(os.environ["DET_HOME"], "checkpoints", uuid, "manifest.json").is_file()
            heard.append((uuid, threading.current_thread()))

    fit(trial_with(Callback()), max_length=Batch(5), checkpoint_period=Batch(1))
    assert heard == [(checkpoint_at(n).name, threading.main_thread()) for n in range(1, 6)]


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


# Copies in host memory

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    if not tensor.numel() or not tensor.dim():
        return tensor
    if draw(st.booleans()):
        tensor = tensor.repeat_interleave(2, dim=0)[::2]
    return tensor.transpose(0, -1) if draw(st.booleans()) else tensor


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.one_of(st.integers(0, 9), st.text(max_size=3))
    maps = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        maps, maps.map(collections.OrderedDict), st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)
    )


leaves = st.one_of(
    tensors(), st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.sets(st.integers()), st.binary()
)
states = st.dictionaries(st.text(max_size=3), st.recursive(leaves, containers, max_leaves=12), max_size=4)


def change_everything(value: Any) -> None:
    """Change all parts of a structure that can be changed in place."""
    if isinstance(value, Tensor):
        value.logical_not_() if value.dtype is torch.bool else value.add_(1)
    elif isinstance(value, dict):
        for one in value.values():
            change_everything(one)
        value["another"] = 1
    elif isinstance(value, list | tuple):
        for one in value:
            change_everything(one)
        if isinstance(value, list):
            value.append(1)
    elif isinstance(value, set):
        value.add("another")


@given(state=states)
@settings(max_examples=60, deadline=None)
def test_nothing_done_to_a_state_changes_its_copy(state: dict[str, Any]) -> None:
    as_it_was = copy.deepcopy(state)
    copied = HostCopier().copy(state)
    change_everything(state)
    assert_same(copied, as_it_was)


@given(first=states, second=states)
@settings(max_examples=60, deadline=None)
def test_copy_of_another_state_into_the_same_buffers_is_right(first: dict[str, Any], second: dict[str, Any]) -> None:
    copier = HostCopier()
    copier.copy(first)
    assert_same(copier.copy(second), second)


def test_attributes_of_state_dicts_are_kept_and_copied() -> None:
    state = {"model": torch.nn.BatchNorm1d(2).state_dict()}
    copied = HostCopier().copy(state)["model"]
    assert copied._metadata == state["model"]._metadata
    state["model"]._metadata[""]["version"] = 99
    assert copied._metadata[""]["version"] != 99


def adam_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in inner for tensor in tensors_in(one)]


def storages_in(value: Any) -> dict[int, int]:
    """Return the sizes of all different pieces of memory, by their addresses."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(value)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_next_copy_uses_the_memory_of_the_one_before() -> None:
    copier, state = HostCopier(), adam_state()
    first = [tensor.data_ptr() for tensor in tensors_in(copier.copy(state))]
    assert [tensor.data_ptr() for tensor in tensors_in(copier.copy(state))] == first


def test_copy_takes_as_much_memory_as_the_state() -> None:
    state = adam_state()
    assert sum(storages_in(HostCopier().copy(state)).values()) == sum(storages_in(state).values())


def test_copy_of_a_part_takes_the_memory_of_the_part() -> None:
    whole = torch.zeros(1000)
    assert sum(storages_in(HostCopier().copy({"part": whole[:10]})).values()) == whole[:10].nbytes


def test_buffers_that_are_not_used_any_more_are_let_go() -> None:
    copier = HostCopier()
    large = copier.copy({"a": torch.zeros(1000)})["a"]
    reference = torch.multiprocessing.reductions.StorageWeakRef(large.untyped_storage())
    del large
    copier.copy({"b": torch.zeros(1)})
    assert reference.expired()


def test_tied_weights_stay_one_tensor() -> None:
    weight = torch.randn(3, 3)
    copied = HostCopier().copy({"a": weight, "b": [weight]})
    assert copied["a"] is copied["b"][0]


def test_views_of_one_memory_that_differ_are_told_apart() -> None:
    numbers = torch.tensor([1 + 2j, 3 + 4j])
    state = {"plain": numbers, "conjugated": numbers.conj(), "half": numbers[:1], "matrix": numbers.view(2, 1)}
    copied = HostCopier().copy(state)
    assert all(torch.equal(copied[name], state[name]) for name in state)


def test_memory_format_is_kept() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    copier = HostCopier()
    for _ in range(2):
        copied = copier.copy({"image": image})["image"]
        assert copied.stride() == image.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(0, 4),
        torch.tensor(1.5),
        torch.ones(1, 3).expand(4, 3),
        torch.randn(4, 6)[::2, 1::3],
        torch.randn(3).bfloat16(),
        torch.nn.Parameter(torch.ones(2)) * 2,
    ],
    ids=["sparse", "empty", "scalar", "expanded", "strided", "bfloat16", "in a graph"],
)
def test_tensor_of_every_kind_is_copied(tensor: Tensor) -> None:
    copier = HostCopier()
    for _ in range(2):
        copied = copier.copy({"one": tensor})["one"]
        assert not copied.requires_grad
        assert copied.layout is tensor.layout
        assert_same(copied, tensor.detach())
