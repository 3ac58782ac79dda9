from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from determined.tensorboard import EventFile, set_current
from determined.tensorboard.metric_writers.pytorch import TorchWriter

Read = Callable[[pathlib.Path], list[Any]]


@pytest.fixture
def trial_folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    file = EventFile(tmp_path / "trial")
    set_current(lambda: file)
    yield tmp_path / "trial"
    set_current(None)


@pytest.fixture
def writer(trial_folder: pathlib.Path) -> TorchWriter:
    with pytest.warns(DeprecationWarning, match="TorchWriter"):
        return TorchWriter()


def test_making_one_warns_and_names_the_successor(trial_folder: pathlib.Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"use context\.get_tensorboard_writer\(\)") as caught:
        TorchWriter()
    assert caught[0].filename == __file__


def test_its_writer_is_a_summary_writer_on_the_trial_s_folder(writer: TorchWriter, trial_folder: pathlib.Path) -> None:
    assert isinstance(writer.writer, SummaryWriter)
    assert writer.writer.get_logdir() == str(trial_folder)


def test_a_tensor_is_written_as_its_value(writer: TorchWriter, trial_folder: pathlib.Path, read_events: Read) -> None:
    writer.add_scalar("loss", torch.tensor(0.25), 3)
    writer.flush()
    (event,) = read_events(trial_folder)
    assert (event.step, event.summary.value[0].tag, event.summary.value[0].simple_value) == (3, "loss", 0.25)


def test_reset_flushes(writer: TorchWriter, trial_folder: pathlib.Path, read_events: Read) -> None:
    writer.add_scalar("loss", 0.5, 0)
    writer.reset()
    assert [event.step for event in read_events(trial_folder)] == [0]


def test_writing_goes_on_in_the_same_file_after_reset(
    writer: TorchWriter, trial_folder: pathlib.Path, read_events: Read
) -> None:
    for step in range(3):
        writer.add_scalar("loss", 0.5, step)
        writer.reset()
    assert [event.step for event in read_events(trial_folder)] == [0, 1, 2]
