"""Checkpoints that version 0.1.0 wrote: later versions continue as if the training had had no break."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import pytest
import torch

import determined as det
import ranks
from determined import pytorch
from trials import records

DATA = pathlib.Path(__file__).parents[2] / "data" / "resolute-0.1.0"
CONFIG = {"name": "everything", "reproducibility": {"experiment_seed": 3}}

# Another torch, device or number of threads than those that wrote the checkpoints.
pytestmark = pytest.mark.filterwarnings("ignore:The checkpoint was saved with")


class Losses(pytorch.PyTorchCallback):
    """Keeps the loss of each batch as it is reported."""

    def __init__(self) -> None:
        self.reported: list[float] = []

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self.reported += [float(metrics["loss"]) for metrics in batch_metrics]


def train(checkpoint: pathlib.Path | None) -> dict[str, Any]:
    """Train to batch 10, and return what the process has then: what it trained on, and its numbers."""
    with det.import_from_path(DATA / "one-process" / "code"):
        from model_def import Trial
    losses = Losses()
    build_callbacks = Trial.build_callbacks
    Trial.build_callbacks = lambda self: {**build_callbacks(self), "losses": losses}
    with pytorch.init(exp_conf=CONFIG, aggregation_frequency=2) as context:
        trial = Trial(context)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(10),
            reporting_period=pytorch.Batch(3),
            checkpoint_policy="none",
            latest_checkpoint=checkpoint,
        )
        rates = [group["lr"] for group in trial.opt.param_groups]
        numbers = [trial.scaler.get_scale(), trial.counter.windows, torch.rand(1).item(), *rates]
        tensors = [*trial.model.parameters(), trial.offset]
        numbers += [number for tensor in tensors for number in tensor.flatten().tolist()]
        return {"log": trial.log, "numbers": numbers, "losses": losses.reported}


def saved_by(processes: str, tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a copy of a checkpoint."""
    return shutil.copytree(DATA / processes, tmp_path / "checkpoint")


def assert_continued(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    """Check that a resumed run ends as the whole one does, up to rounding, which differs between machines."""
    assert resumed["log"] == whole["log"][7:]
    assert resumed["losses"] == pytest.approx(whole["losses"][6:], rel=1e-5)
    assert resumed["numbers"] == pytest.approx(whole["numbers"], rel=1e-5)
    before, after = (
        {one.steps_completed: dict(one.metrics) for one in records().metrics(id, "training")} for id in (1, 2)
    )
    assert after == {steps: pytest.approx(before[steps], rel=1e-5) for steps in (9, 10)}


def test_one_process_continues_where_it_was(tmp_path: pathlib.Path) -> None:
    whole = train(None)
    assert_continued(train(saved_by("one-process", tmp_path)), whole)


def test_two_processes_continue_where_they_were(tmp_path: pathlib.Path) -> None:
    whole = ranks.run(train, 2, None)
    for resumed, other in zip(ranks.run(train, 2, saved_by("two-processes", tmp_path)), whole, strict=True):
        assert_continued(resumed, other)


def test_one_process_continues_what_two_began(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    resumed = train(saved_by("two-processes", tmp_path))
    assert "saved by 2 processes, and 1 continue" in caplog.text
    assert [place[:2] for place in resumed["log"]] == [[2, 7], [3, 8], [3, 9]]
    state = torch.load(DATA / "two-processes" / "state_dict.pth", weights_only=True)
    losses = [one["window"]["values"]["loss"][0] for one in (state["loop"], *state["loop"]["others"])]
    assert resumed["losses"][0] == pytest.approx(sum(losses) / 2)
