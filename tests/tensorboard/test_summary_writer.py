from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import matplotlib.figure
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from determined.tensorboard import EventFile, summary_writer

Read = Callable[[pathlib.Path], list[Any]]


def test_the_writer_is_a_summary_writer_on_the_folder(tmp_path: pathlib.Path) -> None:
    writer = summary_writer(EventFile(tmp_path))
    assert isinstance(writer, SummaryWriter)
    assert writer.get_logdir() == str(tmp_path)


def test_making_a_writer_makes_no_file(tmp_path: pathlib.Path) -> None:
    summary_writer(EventFile(tmp_path / "trial")).close()
    assert not (tmp_path / "trial").exists()


def test_loop_and_writer_records_interleave_in_one_file(tmp_path: pathlib.Path, read_events: Read) -> None:
    file = EventFile(tmp_path)
    writer = summary_writer(file)
    for start in (0, 10):
        file.add_scalars("loop", np.arange(start, start + 3), np.ones(3), np.ones(3))
        writer.add_scalar("user", 0.5, start)
    file.close()
    read = [(event.summary.value[0].tag, event.step) for event in read_events(tmp_path)]
    first, second = ([("loop", start + i) for i in range(3)] + [("user", start)] for start in (0, 10))
    assert read == first + second


def test_a_scalar_keeps_value_step_and_wall_time(tmp_path: pathlib.Path) -> None:
    writer = summary_writer(EventFile(tmp_path))
    writer.add_scalar("loss", 0.1, 300, walltime=12.5)
    writer.flush()
    (scalar,) = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert (scalar.step, scalar.value, scalar.wall_time) == (300, float(np.float32(0.1)), 12.5)


def test_every_kind_of_record_goes_into_the_one_file(tmp_path: pathlib.Path) -> None:
    writer = summary_writer(EventFile(tmp_path))
    writer.add_image("image", torch.zeros(3, 4, 4))
    writer.add_histogram("histogram", torch.arange(10.0))
    writer.add_text("text", "words")
    writer.add_figure("figure", matplotlib.figure.Figure())
    writer.close()
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()
    assert len(list(tmp_path.iterdir())) == 1
    assert (tags["images"], tags["histograms"]) == (["image", "figure"], ["histogram"])
    assert tags["tensors"] == ["text/text_summary"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_graph_goes_into_the_one_file(tmp_path: pathlib.Path) -> None:
    writer = summary_writer(EventFile(tmp_path))
    writer.add_graph(torch.nn.Linear(2, 1), torch.zeros(1, 2))
    writer.close()
    assert len(list(tmp_path.iterdir())) == 1
    assert EventAccumulator(str(tmp_path)).Reload().Tags()["graph"] is True


def test_hparams_and_grouped_scalars_get_runs_in_subfolders(tmp_path: pathlib.Path) -> None:
    with summary_writer(EventFile(tmp_path)) as writer:
        writer.add_hparams({"lr": 0.1}, {"loss": 0.5}, run_name="hparams")
        writer.add_scalars("group", {"a": 1.0}, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["group_a", "hparams"]
    assert EventAccumulator(str(tmp_path / "hparams")).Reload().Scalars("loss")[0].value == 0.5
    assert EventAccumulator(str(tmp_path / "group_a")).Reload().Scalars("group")[0].value == 1.0


def test_closing_the_writer_leaves_the_file_to_the_loop(tmp_path: pathlib.Path, read_events: Read) -> None:
    file = EventFile(tmp_path)
    writer = summary_writer(file)
    writer.add_scalar("user", 0.5, 0)
    writer.close()
    file.add_scalars("loop", [1], [0.5], [1.0])
    writer.add_scalar("user", 0.5, 2)
    writer.close()
    assert [event.step for event in read_events(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("ending", ["flush", "close"])
def test_flush_and_close_make_records_readable(tmp_path: pathlib.Path, read_events: Read, ending: str) -> None:
    writer = summary_writer(EventFile(tmp_path))
    writer.add_scalar("user", 0.5, 4)
    getattr(writer, ending)()
    assert [event.step for event in read_events(tmp_path)] == [4]


def test_without_tensorboard_the_error_names_the_remedy(tmp_path: pathlib.Path) -> None:
    program = """
import pathlib, sys
sys.modules["tensorboard"] = None
from determined.tensorboard import EventFile, summary_writer
try:
    summary_writer(EventFile(pathlib.Path(sys.argv[1])))
except ImportError as error:
    print(error)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    message = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert "pip install tensorboard" in message
    assert "still written without it" in message
