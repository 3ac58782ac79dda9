"""Checkpoints that are damaged, or of another program, are refused saying why."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import determined as det
from determined import pytorch
from saving import change_file, change_state, reseal, state_in, train
from trials import LineTrial


def test_weights_with_the_prefix_of_several_processes_load(checkpoint: pathlib.Path) -> None:
    weights = state_in(checkpoint)["models_state_dict"][0]
    change_state(checkpoint, models_state_dict=[{f"module.{name}": value for name, value in weights.items()}])
    trial = train(latest_checkpoint=checkpoint)
    assert torch.equal(trial.model.weight, weights["weight"])


class TwoModels(LineTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.wrap_model(nn.Linear(1, 1))


class TwoOptimizers(LineTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))


class OtherNames(LineTrial):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 1))


class OtherSize(LineTrial):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))


class OtherShape(LineTrial):
    def make_model(self) -> nn.Module:
        return nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("trial_class", "message"),
    [
        (TwoModels, "1 entries of models_state_dict, but the trial wraps 2"),
        (TwoOptimizers, "1 entries of optimizers_state_dict, but the trial wraps 2"),
        (OtherNames, r"(?s)models_state_dict\[0\] .*0\.weight"),
        (OtherSize, r"(?s)models_state_dict\[0\] .*0\.weight"),
        (OtherShape, r"(?s)models_state_dict\[0\] .*size mismatch for weight"),
    ],
)
def test_checkpoint_of_another_program_is_refused(
    trial_class: type[LineTrial], message: str, checkpoint: pathlib.Path
) -> None:
    with pytest.raises(det.errors.StateMismatchException, match=message):
        train(trial_class, latest_checkpoint=checkpoint)


@pytest.mark.parametrize("key", ["models_state_dict", "optimizers_state_dict", "rng_state", "loop"])
def test_checkpoint_that_lacks_a_part_is_refused_naming_it(key: str, checkpoint: pathlib.Path) -> None:
    change_state(checkpoint, **{key: None})
    with pytest.raises(det.errors.InvalidCheckpointException, match=key):
        train(latest_checkpoint=checkpoint)


@pytest.mark.parametrize("contents", [b"", b"nonsense", b"PK\x03\x04", b"\x80\x02]q\x00."])
def test_file_that_was_saved_as_something_else_is_refused(contents: bytes, checkpoint: pathlib.Path) -> None:
    change_file(checkpoint / "state_dict.pth", contents)
    with pytest.raises(det.errors.InvalidCheckpointException, match=r"state_dict\.pth (cannot be read|holds)"):
        train(latest_checkpoint=checkpoint)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.99])
def test_cut_off_file_is_refused(kept: float, checkpoint: pathlib.Path) -> None:
    whole = (checkpoint / "state_dict.pth").read_bytes()
    (checkpoint / "state_dict.pth").write_bytes(whole[: int(len(whole) * kept)])
    finding = rf"state_dict\.pth is damaged: it has \d+ bytes, and had {len(whole)}"
    with pytest.raises(det.errors.InvalidCheckpointException, match=finding):
        train(latest_checkpoint=checkpoint)


def test_cut_off_file_is_refused_also_where_the_manifest_fits_it(checkpoint: pathlib.Path) -> None:
    whole = (checkpoint / "state_dict.pth").read_bytes()
    change_file(checkpoint / "state_dict.pth", whole[: len(whole) // 2])
    with pytest.raises(det.errors.InvalidCheckpointException, match=r"state_dict\.pth cannot be read"):
        train(latest_checkpoint=checkpoint)


def test_missing_file_is_refused(checkpoint: pathlib.Path) -> None:
    (checkpoint / "state_dict.pth").unlink()
    with pytest.raises(det.errors.InvalidCheckpointException, match=r"state_dict\.pth is missing"):
        train(latest_checkpoint=checkpoint)


def test_checkpoint_saved_without_a_state_is_refused(checkpoint: pathlib.Path) -> None:
    (checkpoint / "state_dict.pth").unlink()
    reseal(checkpoint)
    with pytest.raises(det.errors.InvalidCheckpointException, match=r"no state_dict\.pth"):
        train(latest_checkpoint=checkpoint)


class Creating:
    """Pickles to a call that makes a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.path,)


def test_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path: pathlib.Path, checkpoint: pathlib.Path) -> None:
    change_state(checkpoint, callbacks={"mine": Creating(tmp_path / "canary")})
    with pytest.raises(det.errors.InvalidCheckpointException, match=r"state_dict\.pth"):
        train(latest_checkpoint=checkpoint)
    assert not (tmp_path / "canary").exists()
