"""Checkpoints that Determined 0.38.1 wrote: loaded, continued, and never trusted with more than data."""

from __future__ import annotations

import json
import pathlib
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

import determined as det
from determined import pytorch

DATA = pathlib.Path(__file__).parents[2] / "data" / "determined-0.38.1"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())


def without_is_trainer(folder: pathlib.Path) -> None:
    """Make the second form of Determined's checkpoints, written for class entrypoints."""
    path = folder / "load_data.json"
    description = json.loads(path.read_text())
    del description["is_trainer"]
    path.write_text(json.dumps(description))


@pytest.fixture(params=["with is_trainer", "without is_trainer"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of Determined's checkpoint, in both of its forms."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(DATA / "checkpoint", folder)
    if request.param == "without is_trainer":
        without_is_trainer(folder)
    return folder


def trial_class(folder: pathlib.Path) -> Any:
    """Return the class of the program that wrote the checkpoint, noting what it trains on."""
    with det.import_from_path(folder / "code"):
        from model_def import SquaresTrial

    class Noting(SquaresTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            indices = (batch[0].flatten() * 40).round().int().tolist()
            self.log = [*getattr(self, "log", []), (epoch_idx, batch_idx, indices)]
            return super().train_batch(batch, epoch_idx, batch_idx)

    return Noting


def resume(folder: pathlib.Path, batches: int, callback: pytorch.PyTorchCallback | None = None) -> Any:
    """Go on from a checkpoint to a number of batches and return the trial."""
    description = json.loads((DATA / "checkpoint" / "load_data.json").read_text())
    chosen = trial_class(folder)
    if callback is not None:
        own = chosen.build_callbacks
        chosen.build_callbacks = lambda self: {**own(self), "test": callback}
    with pytorch.init(hparams=description["hparams"], exp_conf=description["experiment_config"]) as context:
        trial = chosen(context)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(batches), latest_checkpoint=folder)
    return trial


def weights_of(trial: Any) -> dict[str, Any]:
    return {
        f"{index}.{name}": value.tolist()
        for index, model in enumerate([trial.model, trial.head])
        for name, value in model.state_dict().items()
    }


class Look(pytorch.PyTorchCallback):
    """Notes what a trial is before its first batch."""

    def __init__(self) -> None:
        self.startup: Any = None
        self.loaded: Any = None

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.startup = first_batch_idx

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = {"callbacks": checkpoint["callbacks"], "progress": checkpoint["loop"]["progress"]}


def test_finished_training_gives_the_saved_state(checkpoint: pathlib.Path) -> None:
    trial = resume(checkpoint, 7)
    assert weights_of(trial) == EXPECTED["weights"]
    assert trial.schedule.get_last_lr() == [EXPECTED["lr"]]
    assert trial.opt.param_groups[0]["lr"] == EXPECTED["lr"]
    assert trial.counter.windows == EXPECTED["windows"]
    assert not hasattr(trial, "log")


def test_state_and_progress_are_there_before_the_first_batch(checkpoint: pathlib.Path) -> None:
    look = Look()
    resume(checkpoint, 8, look)
    assert look.startup == EXPECTED["batches_trained"]
    assert look.loaded["callbacks"]["counter"] == {"windows": EXPECTED["windows"]}
    progress = look.loaded["progress"]
    assert (progress["batches_trained"], progress["epochs_trained"]) == (7, EXPECTED["epochs_trained"])


def test_training_goes_on_at_the_third_batch_of_the_second_epoch(checkpoint: pathlib.Path) -> None:
    log = resume(checkpoint, 11).log
    batches = [list(range(start, start + 8)) for start in (16, 24, 32, 0)]
    assert log == [(1, 7, batches[0]), (1, 8, batches[1]), (1, 9, batches[2]), (2, 10, batches[3])]


def test_optimizer_goes_on_with_its_moments(checkpoint: pathlib.Path) -> None:
    steps = {int(state["step"]) for state in resume(checkpoint, 9).opt.state.values()}
    assert steps == {9}


def test_learning_rate_goes_on(checkpoint: pathlib.Path) -> None:
    assert resume(checkpoint, 9).schedule.get_last_lr() == [EXPECTED["lr"] / 2]  # halved by the ninth batch


def test_random_numbers_go_on(checkpoint: pathlib.Path) -> None:
    draws = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        resume(checkpoint, 7)
        draws.append(torch.rand(3).tolist())
    assert draws[0] == draws[1]


def test_checkpoint_made_from_it_goes_on_in_our_form(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    resume(checkpoint, 9)
    (ours,) = (tmp_path / "det-home" / "checkpoints").iterdir()
    assert not (ours / "trial_state.pkl").exists()
    shutil.copytree(checkpoint / "code", ours / "code", dirs_exist_ok=True)
    assert [entry[:2] for entry in resume(ours, 10).log] == [(1, 9)]


def test_trial_loads_for_looking_at(checkpoint: pathlib.Path) -> None:
    trial = pytorch.load_trial_from_checkpoint_path(checkpoint)
    assert type(trial).__name__ == "SquaresTrial"
    assert weights_of(trial) == EXPECTED["weights"]
    assert trial.context.get_hparam("width") == 5


def test_trial_loads_with_options_of_torch(checkpoint: pathlib.Path) -> None:
    trial = pytorch.load_trial_from_checkpoint_path(checkpoint, torch_load_kwargs={"map_location": "cpu", "mmap": True})
    assert weights_of(trial) == EXPECTED["weights"]


# Files that hold more than data


class Creating:
    """Pickles to a call that makes a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


class Evaluating(Creating):
    """Pickles to a call that runs a program text."""

    def __reduce__(self) -> Any:
        return exec, (f"open({self.path!r}, 'w').close()",)


def in_progress(folder: pathlib.Path, evil: Any) -> None:
    progress = {"batches_trained": 7, "epochs_trained": 1, "last_val": evil, "last_ckpt": 7}
    (folder / "trial_state.pkl").write_bytes(pickle.dumps(progress))


def in_state(folder: pathlib.Path, evil: Any) -> None:
    state = torch.load(folder / "state_dict.pth", weights_only=False)
    torch.save(state | {"callbacks": evil}, folder / "state_dict.pth")


def in_state_of_the_old_format(folder: pathlib.Path, evil: Any) -> None:
    state = torch.load(folder / "state_dict.pth", weights_only=False)
    torch.save(state | {"callbacks": evil}, folder / "state_dict.pth", _use_new_zipfile_serialization=False)


def as_bare_pickle(folder: pathlib.Path, evil: Any) -> None:
    (folder / "state_dict.pth").write_bytes(pickle.dumps(evil, protocol=2))


@pytest.mark.parametrize("evil", [Creating, Evaluating])
@pytest.mark.parametrize("place", [in_progress, in_state, in_state_of_the_old_format, as_bare_pickle])
def test_file_that_would_run_code_is_refused_and_runs_nothing(
    place: Callable[[pathlib.Path, Any], None], evil: type[Creating], tmp_path: pathlib.Path
) -> None:
    folder, canary = tmp_path / "checkpoint", tmp_path / "canary"
    shutil.copytree(DATA / "checkpoint", folder)
    place(folder, evil(canary))
    with pytest.raises(det.errors.InvalidCheckpointException):
        resume(folder, 8)
    with pytest.raises(det.errors.InvalidCheckpointException):
        pytorch.load_trial_from_checkpoint_path(folder, trial_class(folder))
    assert not canary.exists()


@pytest.mark.parametrize(
    "contents",
    [b"", b"nonsense", pickle.dumps(3), pickle.dumps([]), pickle.dumps({}), pickle.dumps({"batches_trained": "x"})],
)
def test_progress_that_makes_no_sense_is_refused(contents: bytes, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(DATA / "checkpoint", folder)
    (folder / "trial_state.pkl").write_bytes(contents)
    with pytest.raises(det.errors.InvalidCheckpointException, match=r"trial_state\.pkl"):
        resume(folder, 8)


def test_checkpoint_without_progress_is_refused(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(DATA / "checkpoint", folder)
    (folder / "trial_state.pkl").unlink()
    with pytest.raises(det.errors.InvalidCheckpointException):
        resume(folder, 8)
