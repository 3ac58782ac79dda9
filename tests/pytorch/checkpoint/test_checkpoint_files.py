"""What a checkpoint holds, and that it appears whole or not at all."""

from __future__ import annotations

import collections
import json
import pathlib
import stat
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import determined as det
from determined import pytorch
from saving import program_in, records, save, state_in, train, trial_with
from trials import LineTrial

# What is in it


def test_folder_holds_its_parts_and_their_manifest() -> None:
    own = {"state_dict.pth", "load_data.json", "metadata.json", "code"}
    assert {path.name for path in save().iterdir()} == own | {"manifest.json"}


def test_state_has_the_keys_that_programs_know() -> None:
    known = {"models_state_dict", "optimizers_state_dict", "lr_schedulers_state_dict", "callbacks", "rng_state"}
    assert set(state_in(save())) == known | {"loop"}


def test_state_holds_the_state_of_everything_wrapped() -> None:
    class Trial(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.wrap_model(nn.Linear(2, 2))
            schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
            context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

    state = state_in(save(Trial))
    assert [list(model) for model in state["models_state_dict"]] == [["weight", "bias"]] * 2
    assert state["optimizers_state_dict"][0]["state"][0]["step"] == 1
    assert state["lr_schedulers_state_dict"][0]["last_epoch"] == 1


def test_random_numbers_of_every_rank_are_in_a_list() -> None:
    (state,) = state_in(save())["rng_state"]
    assert {"cpu_rng_state", "np_rng_state", "random_rng_state"} <= set(state)


def test_state_of_loss_scaling_is_kept_where_it_is_used() -> None:
    class Trial(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            context.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=64.0))
            super().__init__(context)

    assert state_in(save(Trial))["scaler_state_dict"]["scale"] == 64.0


def test_load_data_describes_the_trial() -> None:
    folder = save(hparams={"lr": 0.1}, exp_conf={"name": "lines", "data": {"path": "x"}})
    described = json.loads((folder / "load_data.json").read_text())
    assert program_in(folder).relative_to(folder / "code").as_posix() in described.pop("import_paths")
    assert described.pop("program") == getattr(sys.modules["__main__"], "__file__", None)
    assert described == {
        "trial_type": "PyTorchTrial",
        "experiment_config": {"name": "lines", "data": {"path": "x"}},
        "hparams": {"lr": 0.1},
        "trial_cls_spec": "trials:LineTrial",
        "is_trainer": True,
    }


def test_metadata_says_how_far_and_by_what() -> None:
    metadata = json.loads((save() / "metadata.json").read_text())
    assert metadata["steps_completed"] == 1
    assert metadata["framework"] == f"torch-{torch.__version__}"
    assert metadata["format"]
    assert records().checkpoints()[-1].metadata == metadata


def test_code_holds_the_module_of_the_trial() -> None:
    source = pathlib.Path(sys.modules["trials"].__file__ or "")
    assert (program_in(save()) / "trials.py").read_bytes() == source.read_bytes()


def test_folder_is_for_this_user_alone() -> None:
    assert stat.S_IMODE(save().stat().st_mode) == 0o700


def test_record_lists_the_files_with_their_sizes() -> None:
    folder = save()
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    del files["manifest.json"]
    assert records().checkpoints()[-1].resources == files


# Callbacks and their state


class Keeper(pytorch.PyTorchCallback):
    """Saves what it is given and remembers what it gets back."""

    def __init__(self, state: Any = None) -> None:
        self.state = state
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["value"]


VALUES: dict[str, Any] = {
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "array without dimensions": np.array(2.5),
    "empty array": np.zeros((0, 3)),
    "booleans": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "unsigned": np.array([2**64 - 1], dtype=np.uint64),
    "part of an array": np.arange(10)[::3],
    "reversed array": np.arange(4.0)[::-1],
    "read-only array": np.broadcast_to(np.float32(1), (2, 2)),
    "big-endian array": np.arange(3, dtype=">i4"),
}


@pytest.mark.parametrize("name", list(VALUES))
def test_array_in_callback_state_survives(name: str) -> None:
    given = VALUES[name]
    folder = save(trial_with(Keeper({"deep": [given]})))
    keeper = Keeper()
    train(trial_with(keeper), latest_checkpoint=folder)
    back = keeper.loaded["deep"][0]
    assert isinstance(back, np.ndarray)
    assert back.dtype == given.dtype.newbyteorder("=")
    assert back.shape == given.shape
    assert np.array_equal(back, given)


@pytest.mark.parametrize(
    "given",
    [
        np.float32(0.1),
        np.int64(7),
        np.bool_(True),
        {np.int64(3): "three"},
        {"plain": [1, 2.5, "x", None, True, (1, 2), {3}, b"bytes"]},
        torch.tensor([1.5]),
        float("inf"),
        2**100,
    ],
    ids=str,
)
def test_plain_value_in_callback_state_survives(given: Any) -> None:
    folder = save(trial_with(Keeper(given)))
    keeper = Keeper()
    train(trial_with(keeper), latest_checkpoint=folder)
    assert keeper.loaded == given


class Opaque:
    """A class of the user's."""

    def tell(self) -> None: ...


itself: list[Any] = []
itself.append(itself)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (Opaque().tell, "method"),
        ([{"deep": itself}], r"deep.0.*refers to itself"),
        (threading.Lock(), "lock"),
        (lambda: None, "lambda"),
    ],
    ids=["method", "list in itself", "lock", "lambda"],
)
def test_state_that_cannot_be_saved_is_refused_and_leaves_nothing(
    given: Any, named: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(det.errors.InvalidExperimentException, match=rf"callbacks\.mine\.value.*{named}"):
        train(trial_with(Keeper(given)))
    assert list((tmp_path / "det-home" / "checkpoints").glob("*")) == []
    assert records().checkpoints() == []


def test_save_start_may_change_what_is_written_and_load_start_sees_it() -> None:
    class Stamp(pytorch.PyTorchCallback):
        def __init__(self) -> None:
            self.seen: dict[str, Any] = {}

        def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["vocabulary"] = ["a", "b"]
            checkpoint["optimizers_state_dict"][0]["param_groups"][0]["lr"] = 0.125

        def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
            self.seen = dict(checkpoint)

    stamp = Stamp()
    folder = save(trial_with(stamp))
    trial = train(trial_with(stamp), latest_checkpoint=folder)
    assert stamp.seen["vocabulary"] == ["a", "b"]
    assert trial.optimizer.param_groups[0]["lr"] == 0.125


def test_load_start_may_change_what_is_loaded() -> None:
    class Change(pytorch.PyTorchCallback):
        def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["models_state_dict"][0]["bias"] += 100

    folder = save()
    before = state_in(folder)["models_state_dict"][0]["bias"]
    trial = train(trial_with(Change()), latest_checkpoint=folder)
    assert torch.equal(trial.model.bias, before + 100)


def test_write_end_may_add_files() -> None:
    class Export(pytorch.PyTorchCallback):
        def on_checkpoint_write_end(self, checkpoint_dir: pathlib.Path) -> None:
            assert (checkpoint_dir / "state_dict.pth").is_file()
            (checkpoint_dir / "export").mkdir()
            (checkpoint_dir / "export" / "vocabulary.txt").write_text("a b")

    folder = save(trial_with(Export()))
    assert (folder / "export" / "vocabulary.txt").read_text() == "a b"
    assert records().checkpoints()[-1].resources["export/vocabulary.txt"] == 3


@pytest.mark.parametrize("hook", ["on_checkpoint_save_start", "on_checkpoint_write_end"])
def test_exception_while_writing_leaves_nothing(hook: str, tmp_path: pathlib.Path) -> None:
    def fail(self: Any, *_: Any) -> None:
        raise OSError("no space left")

    failing = type("Failing", (pytorch.PyTorchCallback,), {hook: fail})
    with pytest.raises(OSError, match="no space left"):
        train(trial_with(failing()))
    store = tmp_path / "det-home" / "checkpoints"
    assert not store.exists() or list(store.iterdir()) == []
    assert records().checkpoints() == []


def test_state_of_a_callback_that_cannot_be_saved_is_refused_before_the_first_batch() -> None:
    seen = []

    class Trial(LineTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            seen.append(batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytest.raises(det.errors.InvalidExperimentException, match="mine"):
        train(trial_with(Keeper(Opaque().tell), Trial))
    assert seen == []


def test_ordered_dict_with_arrays_in_callback_state_survives() -> None:
    given = collections.OrderedDict(b=np.arange(3), a=collections.OrderedDict(c=[np.float32(0.5), np.ones((2, 2))]))
    folder = save(trial_with(Keeper(given)))
    keeper = Keeper()
    train(trial_with(keeper), latest_checkpoint=folder)
    assert type(keeper.loaded) is collections.OrderedDict
    assert list(keeper.loaded) == ["b", "a"]
    assert np.array_equal(keeper.loaded["b"], given["b"])
    assert keeper.loaded["a"]["c"][0] == 0.5
    assert np.array_equal(keeper.loaded["a"]["c"][1], np.ones((2, 2)))
