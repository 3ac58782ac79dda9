"""Checkpoints in the layouts of Determined 0.13 to 0.21: loaded, and continued as if the training had had no break."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

import determined as det
from determined import pytorch

PROGRAM = """
import torch
from determined import pytorch

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.seen = []
        self.model = context.wrap_model(torch.nn.Linear(1, context.get_hparam("width")))
        self.opt = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        step_every_batch = pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH
        self.schedule = context.wrap_lr_scheduler(torch.optim.lr_scheduler.StepLR(self.opt, 3), step_every_batch)

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.arange(20.0).reshape(-1, 1) / 20, batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.seen.append((epoch_idx, batch_idx))
        loss = (self.model(batch + torch.rand(1)) - batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.opt)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": (self.model(batch) - batch).square().mean()}
"""

HPARAMS = {"width": 3, "global_batch_size": 4}
CONFIG = {"entrypoint": "model_def:Trial", "hyperparameters": HPARAMS, "searcher": {"metric": "validation_loss"}}
BATCHES, EPOCH = 7, 5


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """The program, its state after seven batches, and its weights after nine without a break."""

    trial_class: Any
    state: dict[str, Any]
    weights_then: dict[str, list[Any]]
    weights_at_the_end: dict[str, list[Any]]


def weights_of(trial: Any) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in trial.model.state_dict().items()}


def rng_state() -> dict[str, Any]:
    """The random numbers in the form of Determined: with the array of NumPy as it is."""
    return {
        "cpu_rng_state": torch.get_rng_state(),
        "np_rng_state": np.random.get_state(legacy=True),
        "random_rng_state": random.getstate(),
    }


def fit(trial_class: Any, batches: int, folder: pathlib.Path | None = None) -> Any:
    with pytorch.init(hparams=HPARAMS, exp_conf=CONFIG) as context:
        trial = trial_class(context)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(batches), latest_checkpoint=folder)
    return trial


@pytest.fixture
def trained(tmp_path: pathlib.Path) -> Trained:
    code = tmp_path / "checkpoint" / "code"
    code.mkdir(parents=True)
    (code / "model_def.py").write_text(PROGRAM)
    with det.import_from_path(code):
        import model_def

    states: list[dict[str, Any]] = []

    class Watched(model_def.Trial):  # type: ignore[misc, name-defined]
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == BATCHES:
                state = {
                    "models_state_dict": [self.model.state_dict()],
                    "optimizers_state_dict": [self.opt.state_dict()],
                    "lr_schedulers_state_dict": [self.schedule.state_dict()],
                    "callbacks": {},
                }
                # By way of a file, so that the training does not go on in it.
                torch.save(state, tmp_path / "state.pth")
                states.append(torch.load(tmp_path / "state.pth", weights_only=True) | {"rng_state": rng_state()})
            return super().train_batch(batch, epoch_idx, batch_idx)

    whole = fit(Watched, BATCHES + 2)
    (state,) = states
    then = {name: value.tolist() for name, value in state["models_state_dict"][0].items()}
    return Trained(model_def.Trial, state, then, weights_of(whole))


# The layouts


def of_one_model(state: dict[str, Any]) -> dict[str, Any]:
    named = {
        "model_state_dict": state["models_state_dict"][0],
        "optimizer_state_dict": state["optimizers_state_dict"][0],
        "lr_scheduler": state["lr_schedulers_state_dict"][0],
    }
    return {name: value for name, value in state.items() if not name.endswith("s_state_dict")} | named


def put(folder: pathlib.Path, name: str, contents: dict[str, Any]) -> None:
    if name.endswith(".pkl"):
        (folder / name).write_bytes(pickle.dumps(contents))
    else:
        (folder / name).write_text(json.dumps(contents))


def of_torch_1_4(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out what optimizers have learned since."""
    (optimizer,) = state["optimizers_state_dict"]
    newer = ("maximize", "foreach", "differentiable", "fused")
    groups = [{key: value for key, value in group.items() if key not in newer} for group in optimizer["param_groups"]]
    return state | {"optimizers_state_dict": [optimizer | {"param_groups": groups}]}


def write_0_13(folder: pathlib.Path, state: dict[str, Any]) -> None:
    torch.save(of_torch_1_4(state), folder / "state_dict.pth", _use_new_zipfile_serialization=False)
    put(folder, "metadata.json", {"hparams": HPARAMS, "experiment_config": CONFIG, "framework": "torch-1.4.0"})


def write_0_13_of_one_model(folder: pathlib.Path, state: dict[str, Any]) -> None:
    torch.save(of_one_model(state), folder / "state_dict.pth", _use_new_zipfile_serialization=False)
    put(folder, "metadata.json", {"hparams": HPARAMS, "experiment_config": CONFIG, "torch_version": "1.4.0"})


def sequencer(**batches: int) -> dict[str, Any]:
    return {"trial_id": 1, "last_ckpt": 5, "step_id": 2, "last_val": None, **batches}


def write_0_17_6(folder: pathlib.Path, state: dict[str, Any]) -> None:
    write_0_13(folder, state)
    put(folder, "workload_sequencer.pkl", sequencer(latest_batch=BATCHES))


def load_data(**more: Any) -> dict[str, Any]:
    told = {"trial_type": "PyTorchTrial", "trial_cls_spec": "model_def:Trial"}
    return {**told, "hparams": HPARAMS, "experiment_config": CONFIG, **more}


def write_0_17_7(folder: pathlib.Path, state: dict[str, Any]) -> None:
    torch.save(state, folder / "state_dict.pth")
    put(folder, "metadata.json", {"latest_batch": BATCHES, "framework": "torch-1.9.0", "format": "pickle"})
    put(folder, "load_data.json", load_data())
    put(folder, "workload_sequencer.pkl", sequencer(latest_batch=BATCHES))


def write_0_20(folder: pathlib.Path, state: dict[str, Any]) -> None:
    write_0_17_7(folder, state)
    put(folder, "metadata.json", {"steps_completed": BATCHES, "framework": "torch-1.12.0", "format": "pickle"})
    put(folder, "workload_sequencer.pkl", sequencer(steps_completed=BATCHES))


def write_0_21(folder: pathlib.Path, state: dict[str, Any]) -> None:
    torch.save(state, folder / "state_dict.pth")
    put(folder, "metadata.json", {"steps_completed": BATCHES, "framework": "torch-1.12.0", "format": "pickle"})
    put(folder, "load_data.json", load_data(trial_cls_spec="__main__:Trial", is_trainer=True))
    progress = {"trial_id": 1, "last_ckpt": 5, "step_id": 2, "last_val": 5}
    put(folder, "trial_state.pkl", {**progress, "batches_trained": BATCHES, "epochs_trained": BATCHES // EPOCH})


WITH_POSITION = [write_0_17_6, write_0_17_7, write_0_20, write_0_21]
WITHOUT_POSITION = [write_0_13, write_0_13_of_one_model]


@pytest.mark.parametrize("write", [*WITHOUT_POSITION, *WITH_POSITION])
def test_trial_loads_with_its_weights(write: Any, trained: Trained, tmp_path: pathlib.Path) -> None:
    write(tmp_path / "checkpoint", trained.state)
    trial = pytorch.load_trial_from_checkpoint_path(tmp_path / "checkpoint")
    assert weights_of(trial) == trained.weights_then
    assert type(trial).__module__ == "model_def"


@pytest.mark.parametrize("write", WITH_POSITION)
def test_training_goes_on_as_without_a_break(write: Any, trained: Trained, tmp_path: pathlib.Path) -> None:
    write(tmp_path / "checkpoint", trained.state)
    trial = fit(trained.trial_class, BATCHES + 2, tmp_path / "checkpoint")
    assert trial.seen == [(1, 7), (1, 8)]
    assert weights_of(trial) == trained.weights_at_the_end


@pytest.mark.parametrize("write", WITHOUT_POSITION)
def test_training_without_a_position_starts_at_batch_0_with_the_weights(
    write: Any, trained: Trained, tmp_path: pathlib.Path
) -> None:
    write(tmp_path / "checkpoint", trained.state)
    trial = fit(trained.trial_class, 1, tmp_path / "checkpoint")
    assert trial.seen == [(0, 0)]
    assert trial.schedule.last_epoch == BATCHES + 1


def test_state_without_random_numbers_goes_on_with_those_of_the_seed(trained: Trained, tmp_path: pathlib.Path) -> None:
    del trained.state["rng_state"]
    write_0_20(tmp_path / "checkpoint", trained.state)
    assert fit(trained.trial_class, BATCHES + 1, tmp_path / "checkpoint").seen == [(1, 7)]


def test_weights_of_a_ddp_model_load(trained: Trained, tmp_path: pathlib.Path) -> None:
    (weights,) = trained.state["models_state_dict"]
    trained.state["models_state_dict"] = [{f"module.{name}": value for name, value in weights.items()}]
    write_0_13_of_one_model(tmp_path / "checkpoint", trained.state)
    trial = pytorch.load_trial_from_checkpoint_path(tmp_path / "checkpoint")
    assert weights_of(trial) == trained.weights_then


def test_both_forms_of_a_state_at_once_are_refused(trained: Trained, tmp_path: pathlib.Path) -> None:
    write_0_13(tmp_path / "checkpoint", trained.state | of_one_model(trained.state))
    with pytest.raises(det.errors.InvalidCheckpointException, match="both model_state_dict and models_state_dict"):
        pytorch.load_trial_from_checkpoint_path(tmp_path / "checkpoint")


def test_class_of_a_script_is_refused_where_two_files_define_it(trained: Trained, tmp_path: pathlib.Path) -> None:
    write_0_21(tmp_path / "checkpoint", trained.state)
    (tmp_path / "checkpoint" / "code" / "other.py").write_text("class Trial: pass")
    with pytest.raises(det.errors.InvalidCheckpointException, match="pass trial_class=YourTrial"):
        pytorch.load_trial_from_checkpoint_path(tmp_path / "checkpoint")


class Creating:
    """Pickles to a call that makes a folder."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_sequencer_that_would_run_code_is_refused_and_runs_nothing(trained: Trained, tmp_path: pathlib.Path) -> None:
    folder, canary = tmp_path / "checkpoint", tmp_path / "canary"
    write_0_20(folder, trained.state)
    put(folder, "workload_sequencer.pkl", {**sequencer(steps_completed=BATCHES), "last_val": Creating(canary)})
    with pytest.raises(det.errors.InvalidCheckpointException, match=r"workload_sequencer\.pkl.*mkdir"):
        fit(trained.trial_class, BATCHES + 1, folder)
    assert not canary.exists()


def test_sequencer_without_a_position_is_refused(trained: Trained, tmp_path: pathlib.Path) -> None:
    write_0_20(tmp_path / "checkpoint", trained.state)
    put(tmp_path / "checkpoint", "workload_sequencer.pkl", sequencer())
    with pytest.raises(det.errors.InvalidCheckpointException, match=r"workload_sequencer\.pkl"):
        fit(trained.trial_class, BATCHES + 1, tmp_path / "checkpoint")
