"""Objects of other classes in the states that a program keeps: saved, restored, and never a way to run code."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import logging
import os
import pathlib
import types
import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from determined import pytorch
from determined.errors import InvalidCheckpointException
from determined.pytorch import Batch
from saving import change_state, save, state_in, train, trial_with
from trials import LineTrial, line_data

load = pytorch.load_trial_from_checkpoint_path


class Phase(enum.Enum):
    WARMUP = "warm-up"
    TRAINING = "training"


class Settings(dict[str, Any]):
    """A dict with attributes, as many programs have one."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclasses.dataclass(frozen=True)
class Best:
    score: float
    path: pathlib.Path


@dataclasses.dataclass(slots=True)
class Slotted:
    values: list[int]


class Point(NamedTuple):
    x: int
    y: int


class Counting:
    """Restores itself by code of its own."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.count = state["count"] + 1000


def halved(step: int) -> float:
    return 0.5**step


class Starting:
    """Leaves a file behind when its constructor runs, or its property is set."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        pathlib.Path(path).touch()

    def set_file(self, path: str) -> None:
        pathlib.Path(path).touch()

    file = property(None, set_file)


class Touching:
    """Leaves a file behind when it is made again."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        pathlib.Path(state["path"]).touch()


OBJECTS: dict[str, Any] = {
    "dict subclass": Settings(lr=0.1, sizes=[1, 2]),
    "namespace": argparse.Namespace(lr=0.1, path=pathlib.Path("a/b")),
    "simple namespace": types.SimpleNamespace(a=1),
    "enum": Phase.TRAINING,
    "path": pathlib.Path("/data/x"),
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "deque": collections.deque([1, 2, 3], maxlen=3),
    "counter": collections.Counter("abca"),
    "function": halved,
    "class": Settings,
    "dataclass": Best(0.5, pathlib.Path("best")),
    "slots": Slotted([1, 2]),
    "named tuple": Point(1, 2),
    "keys": {Phase.WARMUP: 1, ("a", Phase.TRAINING): 2},
    "set": {Phase.WARMUP},
    "frozen set": frozenset({1, 2}),
    "time": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
    "id": uuid.UUID(int=5),
}


class Keeping(pytorch.PyTorchCallback):
    """Keeps what it is given in its state, or in the checkpoint itself, and remembers what comes back."""

    def __init__(self, given: Any, fresh: Any = None, *, beside: bool = False) -> None:
        self.given, self.fresh, self.beside = given, fresh, beside
        self.loaded: Any = None
        self.has_trained = False

    def on_training_start(self) -> None:
        self.has_trained = True

    def state_dict(self) -> dict[str, Any]:
        return {} if self.beside else {"value": self.given if self.has_trained else self.fresh}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict.get("value", self.loaded)

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        if self.beside:
            checkpoint["mine"] = self.given

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        if self.beside:
            self.loaded = checkpoint["mine"]


def resumed(folder: pathlib.Path, keeping: Keeping) -> Any:
    train(trial_with(keeping), latest_checkpoint=folder, max_length=Batch(2))
    return keeping.loaded


def assert_equal_kinds(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours == theirs
    assert {name: type(one) for name, one in ours.items()} == {name: type(one) for name, one in theirs.items()}


@pytest.mark.parametrize(("fresh", "beside"), [(OBJECTS, False), (None, True)], ids=["callback", "save_start"])
def test_objects_come_back_as_they_were(fresh: Any, beside: bool) -> None:
    folder = save(trial_with(Keeping(OBJECTS, fresh, beside=beside)))
    loaded = resumed(folder, Keeping({}, fresh, beside=beside))
    assert_equal_kinds(loaded, OBJECTS)
    assert loaded["deque"].maxlen == 3
    assert loaded["defaultdict"]["new"] == []


def test_file_stays_readable_by_torch_alone() -> None:
    assert state_in(save(trial_with(Keeping(OBJECTS, beside=True))))["mine"]


def test_data_that_a_callback_gets_only_later_comes_back() -> None:
    late = {name: one for name, one in OBJECTS.items() if name != "function"}
    assert_equal_kinds(resumed(save(trial_with(Keeping(late))), Keeping({})), late)


def test_tensors_and_arrays_inside_of_objects_come_back() -> None:
    given = Settings(weights=torch.arange(3.0), names=np.array(["a", "b"]), table=np.arange(4))
    loaded = resumed(save(trial_with(Keeping(given, given))), Keeping({}, given))
    assert torch.equal(loaded.weights, given.weights)
    assert loaded.names.tolist() == ["a", "b"]
    assert np.array_equal(loaded.table, given.table)


class Head(nn.Linear):
    """A module with a state of its own besides its weights."""

    phase = Phase.WARMUP

    def get_extra_state(self) -> Any:
        return {"phase": self.phase}

    def set_extra_state(self, state: Any) -> None:
        self.phase = state["phase"]


class ScheduledSGD(torch.optim.SGD):
    """An optimizer with an object in its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["settings"] = Settings(phase=Phase.WARMUP)


class Decay(torch.optim.lr_scheduler.StepLR):
    """A scheduler that keeps a function and a namespace."""

    def __init__(self, optimizer: Any) -> None:
        self.shape, self.options = halved, argparse.Namespace(gamma=0.5)
        super().__init__(optimizer, 1)


class WrappingTrial(LineTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(Head(4, 1))
        self.optimizer = context.wrap_optimizer(ScheduledSGD(self.model.parameters()))
        self.scheduler = Decay(self.optimizer)
        context.wrap_lr_scheduler(self.scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        self.seen = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.model.phase = self.optimizer.param_groups[0]["settings"]["phase"] = Phase.TRAINING
            self.scheduler.options.gamma = 0.25
        return super().train_batch(batch, epoch_idx, batch_idx)


def test_objects_of_models_optimizers_and_schedulers_come_back() -> None:
    trial = train(WrappingTrial, latest_checkpoint=save(WrappingTrial), max_length=Batch(2))
    assert trial.model.phase is Phase.TRAINING
    assert trial.optimizer.param_groups[0]["settings"] == Settings(phase=Phase.TRAINING)
    assert trial.scheduler.options == argparse.Namespace(gamma=0.25)
    assert trial.scheduler.shape is halved


class Files(torch.utils.data.IterableDataset[Any]):
    """Tells its position by an object, as a reader of many files may."""

    def __init__(self) -> None:
        self.position = Point(0, 0)

    def __iter__(self) -> Any:
        for sample in list(line_data())[self.position.x :]:
            self.position = Point(self.position.x + 1, 0)
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["position"]) is Point
        self.position = state["position"]


def test_objects_of_data_sets_come_back() -> None:
    class Trial(LineTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            self.files = Files()
            return pytorch.DataLoader(self.files, batch_size=4)

    assert train(Trial, latest_checkpoint=save(Trial), max_length=Batch(2)).files.position == Point(8, 0)


# What is not loaded


def test_class_that_runs_code_of_its_own_comes_back_where_the_program_holds_it() -> None:
    given = Counting(3)
    assert resumed(save(trial_with(Keeping(given, given))), Keeping(None, Counting())).count == 1003


def test_class_that_runs_code_of_its_own_and_comes_later_is_announced_and_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        folder = save(trial_with(Keeping(Counting(3))))
    assert "test_objects_in_states.Counting under callbacks.mine.value" in caplog.text
    with pytest.raises(InvalidCheckpointException, match=r"under callbacks\.mine\.value.*\.Counting.*add_safe_globals"):
        resumed(folder, Keeping(None))


def test_class_that_the_program_declares_safe_comes_back() -> None:
    folder = save(trial_with(Keeping(Counting(3))))
    with torch.serialization.safe_globals([Counting]):
        assert resumed(folder, Keeping(None)).count == 1003


def made(name: str, **parts: Any) -> dict[str, Any]:
    """Return what stands in a file for an object of a class of this name."""
    return {"__object__": {"class": name, "new": False, **parts}}


HERE = "test_objects_in_states"
FORGED: dict[str, Any] = {
    "function": made("os.mknod", args=["canary"]),
    "evaluation": made("builtins.eval", args=["open('canary', 'w')"]),
    "attribute": made("builtins.getattr", args=[{"__global__": "builtins.object"}, "__subclasses__"]),
    "function of the program": made(f"{HERE}.halved", args=[1]),
    "class of the program that runs code": made(f"{HERE}.Touching", new=True, state={"path": "canary"}),
    "constructor of the program": made(f"{HERE}.Starting", args=["canary"]),
    "property of the program": made(f"{HERE}.Starting", new=True, state=(None, {"file": "canary"})),
    "import": {"__global__": "antigravity.fly"},
    "module in a module": {"__global__": f"{HERE}.os.system"},
    "memory": made("builtins.bytes", args=[1 << 40]),
    "no name": made([1]),  # type: ignore[arg-type]
    "no parts": {"__object__": 3},
}


@pytest.mark.parametrize("name", list(FORGED))
def test_forged_object_is_refused(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(WrappingTrial)
    monkeypatch.chdir(tmp_path)
    change_state(folder, mine=FORGED[name])
    with pytest.raises(InvalidCheckpointException):
        train(WrappingTrial, latest_checkpoint=folder, max_length=Batch(2))
    assert not os.path.exists("canary")


def test_function_that_the_program_holds_elsewhere_is_refused() -> None:
    folder = save(WrappingTrial)
    change_state(folder, callbacks={"mine": {"value": {"__global__": f"{HERE}.halved"}}})
    with pytest.raises(InvalidCheckpointException, match=r"a reference to test_objects_in_states\.halved"):
        train(trial_with(Keeping(None), WrappingTrial), latest_checkpoint=folder, max_length=Batch(2))


def test_checkpoint_does_not_change_the_members_of_an_enum() -> None:
    folder = save(WrappingTrial)
    change_state(folder, mine=made(f"{HERE}.Phase", args=["warm-up"], state={"_value_": "forged"}))
    train(WrappingTrial, latest_checkpoint=folder, max_length=Batch(2))
    assert Phase.WARMUP.value == "warm-up"


def test_load_trial_takes_no_classes_of_programs() -> None:
    folder = save(WrappingTrial)
    with pytest.raises(InvalidCheckpointException, match=r"models_state_dict\.0\._extra_state\.phase.*\.Phase"):
        load(folder, WrappingTrial)
    with torch.serialization.safe_globals([Phase]):
        assert load(folder, WrappingTrial).model.phase is Phase.TRAINING


def test_load_trial_does_not_look_at_objects_outside_of_models() -> None:
    assert isinstance(load(save(trial_with(Keeping(OBJECTS, OBJECTS))), LineTrial), LineTrial)
