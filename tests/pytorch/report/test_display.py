"""What a person sees of a run."""

from __future__ import annotations

import fcntl
import io
import os
import pathlib
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from typing import Any

import pytest

import forking
from determined import pytorch
from determined._home import home
from determined.pytorch import Batch, Epoch
from trials import LineTrial, fit, latest_checkpoint, records

PROGRAM = """
import os, sys
import torch
from determined import pytorch
from trials import LineTrial

class Trial(LineTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        if "DET_LATEST_CHECKPOINT" not in os.environ and batch_idx == 3:
            self.context.set_stop_requested(True)
        return super().train_batch(batch, epoch_idx, batch_idx)

with pytorch.init(exp_conf={"reproducibility": {"experiment_seed": 1}}) as context:
    trainer = pytorch.Trainer(Trial(context), context)
    trainer.fit(
        max_length=pytorch.Batch(int(sys.argv[1])),
        validation_period=pytorch.Batch(2),
        reporting_period=pytorch.Batch(1),
    )
"""


@pytest.fixture
def program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a small training program that stops itself after 4 batches unless it is continued."""
    file = tmp_path / "train program.py"  # a blank, to be quoted in the command that continues
    file.write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", forking.PYTHONPATH)
    return [sys.executable, str(file)]


def shown_by(output: str) -> list[str]:
    """Lines without their time of day."""
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in output.splitlines()]


# Lines


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Returns a function that trains a trial and returns what was printed."""

    def run(trial_class: type[LineTrial] = LineTrial, **arguments: Any) -> list[str]:
        fit(trial_class, **arguments)
        return shown_by(capsys.readouterr().out)

    return run


def test_each_report_is_a_line_with_place_metrics_and_rate(lines: Callable[..., list[str]]) -> None:
    shown = lines(max_length=Epoch(2), reporting_period=Batch(4))
    reports = [line for line in shown if "samples/s" in line]
    pattern = r"batch {}/12, epoch {}/2\.0 \| loss [\d.e+-]+ \| [\d.,e+]+ samples/s"
    places = [(4, r"0\.7"), (8, r"1\.3"), (12, r"2\.0")]
    assert len(reports) == 3
    assert all(re.fullmatch(pattern.format(*place), line) for line, place in zip(reports, places, strict=True)), reports


def test_each_validation_is_a_line(lines: Callable[..., list[str]]) -> None:
    shown = lines(max_length=Batch(2), validation_period=Batch(1))
    found = [line for line in shown if re.search(r"batch \d/2.*\| validation \| validation_loss [\d.]+$", line)]
    assert len(found) == 2


def test_each_checkpoint_is_a_line(lines: Callable[..., list[str]]) -> None:
    shown = lines(max_length=Batch(2))
    assert any(line.endswith(f"| saved checkpoint {latest_checkpoint()}") for line in shown)


def test_the_end_says_where_everything_is(lines: Callable[..., list[str]]) -> None:
    lines(max_length=Batch(1))
    *_, checkpoints, tensorboard, record, following = (line.strip() for line in lines(max_length=Batch(1)))
    assert checkpoints == f"checkpoints: {home().checkpoints}"
    assert tensorboard == f"TensorBoard: {home().tensorboard(2, 2)}"
    assert record == "record: det experiment describe 2"
    # Another fit of this process was the first, which the environment variable would be for.
    assert following == f"continue: fit(latest_checkpoint={latest_checkpoint()!r})"


def test_tensorboard_that_is_off_is_not_mentioned(lines: Callable[..., list[str]]) -> None:
    shown = lines(init={"enable_tensorboard_logging": False}, max_length=Batch(1))
    assert not any("TensorBoard" in line for line in shown)


def test_batches_are_counted_where_samples_cannot_be(lines: Callable[..., list[str]]) -> None:
    class Opaque(LineTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            loader = super().build_training_data_loader()
            return pytorch.DataLoader(loader.dataset, batch_size=4, collate_fn=lambda samples: {"n": 1, "of": samples})

        def loss(self, batch: Any) -> Any:
            import torch

            pair = torch.utils.data.default_collate(batch["of"]) if isinstance(batch, dict) else batch
            return super().loss(pair)

    assert any("batches/s" in line for line in lines(Opaque, max_length=Batch(1)))


def test_own_batch_length_counts_samples(lines: Callable[..., list[str]]) -> None:
    asked = []

    class Counting(LineTrial):
        def get_batch_length(self, batch: Any) -> int:
            asked.append(len(batch))
            return 1000

    assert any("samples/s" in line for line in lines(Counting, max_length=Batch(1)))
    assert asked


def test_metrics_that_are_no_numbers_are_left_out(lines: Callable[..., list[str]]) -> None:
    class Noting(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            return metrics | {"note": "text", **{f"m{i:02}": i for i in range(20)}}

    (report,) = (line for line in lines(Noting, max_length=Batch(1)) if "samples/s" in line)
    assert "note" not in report
    assert "m06 6, ..." in report


# Output that does not work


class Tee:
    """Has no more than what `print` needs."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


class NobodyReads(Tee):
    def flush(self) -> None:
        raise BrokenPipeError


class Disk(io.StringIO):
    """Full."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def closed() -> io.StringIO:
    output = io.StringIO()
    output.close()
    return output


@pytest.mark.parametrize("switch", ["0", "1", None])
@pytest.mark.parametrize("output", [lambda: None, NobodyReads, Disk, closed])
def test_training_goes_on_where_nothing_can_be_shown(
    output: Callable[[], Any], switch: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DET_PROGRESS")
    if switch:
        monkeypatch.setenv("DET_PROGRESS", switch)
    monkeypatch.setattr(sys, "stdout", output())
    assert len(fit(max_length=Batch(2)).seen) == 2


def test_output_that_cannot_tell_whether_it_is_a_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DET_PROGRESS")
    monkeypatch.setattr(sys, "stdout", tee := Tee())
    fit(max_length=Batch(2))
    assert "batch 2/2" in tee.text


@pytest.mark.parametrize("switch", ["0", "1"])
def test_characters_without_a_code_are_replaced(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Accents(LineTrial):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"validation_loss": 0.0, "précision": 0.5}

    monkeypatch.setenv("DET_PROGRESS", switch)
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    fit(Accents, max_length=Batch(2))
    assert "pr?cision 0.5" in raw.getvalue().decode("ascii")


# In processes of their own


def test_without_a_terminal_there_are_lines_and_the_command_to_continue_works(
    program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DET_PROGRESS")
    first = forking.run([*program[1:], "6"], capture_output=True, check=True)
    shown = shown_by(first.stdout)
    assert [line for line in shown if "\x1b" in line] == []
    (command,) = (line.partition("continue: ")[2] for line in shown if "continue: " in line)
    again = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    places = re.findall(r"batch (\d)/6, .*samples/s", again.stdout)
    assert places == ["5", "6"]
    assert records().trial(2).source_steps_completed == 4


def under_a_terminal(command: list[str]) -> str:
    """What a program writes to a terminal of 80 columns, without the control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    ours_alone = ("DET_PROGRESS", "NO_COLOR", "COLUMNS", "LINES")
    environment = {name: value for name, value in os.environ.items() if name not in ours_alone}
    process = forking.start(command[1:], stdout=theirs, stderr=forking.STDOUT, env=environment | {"TERM": "xterm"})
    os.close(theirs)
    written = b""
    while chunk := read_some(ours):
        written += chunk
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def read_some(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side is closed
        return b""


def test_in_a_terminal_there_is_a_bar_with_everything_about_the_run(program: list[str]) -> None:
    screen = under_a_terminal([*program, "6"])
    last = screen[screen.rindex("batch 4/6") :]
    uuid = latest_checkpoint()
    expected = [
        r"^batch 4/6, epoch 0\.7/1\.0",
        r"\d:\d\d left",
        r"[\d,.]+ samples/s",
        r"training loss [\d.]+",
        r"validation validation_loss [\d.]+",
        rf"checkpoint {uuid}",
        rf"checkpoints: {re.escape(str(home().checkpoints))}",
        r"TensorBoard: ",
        r"record: det experiment describe 1",
        rf"continue: DET_LATEST_CHECKPOINT={uuid} {re.escape(shlex.join([*program, '6']))}\r",
    ]
    assert [pattern for pattern in expected if not re.search(pattern, last)] == [], last
    assert "━" in screen or "█" in screen or "╸" in screen, "there is a bar"
