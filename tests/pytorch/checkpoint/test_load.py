"""`load_trial_from_checkpoint_path`: a trial and its trained models from a folder, without a run."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import determined as det
import forking
from determined import pytorch
from saving import change_file, change_state, program_in, reseal, save, state_in, train
from trials import LineTrial

load = pytorch.load_trial_from_checkpoint_path


def describe(folder: pathlib.Path, **changes: Any) -> None:
    """Change entries of a checkpoint's load_data.json."""
    path = folder / "load_data.json"
    change_file(path, json.dumps(json.loads(path.read_text()) | changes))


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class WithArguments(LineTrial):
    """Wants more than a context."""

    def __init__(self, context: pytorch.PyTorchTrialContext, size: int = 0, *, name: str = "") -> None:
        super().__init__(context)
        self.size, self.name = size, name


# Which class


def test_class_is_imported_from_the_checkpoint_and_has_the_saved_weights(checkpoint: pathlib.Path) -> None:
    trial = load(checkpoint)
    assert type(trial).__name__ == "LineTrial"
    assert type(trial) is not LineTrial  # that of the checkpoint's code
    assert torch.equal(trial.model.weight, state_in(checkpoint)["models_state_dict"][0]["weight"])


def test_path_may_be_a_str() -> None:
    assert isinstance(load(str(save())), pytorch.PyTorchTrial)


def test_loaded_model_can_be_used() -> None:
    assert load(save()).evaluate_batch((torch.ones(2, 4), torch.ones(2, 1)), 0)["validation_loss"] >= 0


def test_class_given_is_taken_with_its_arguments() -> None:
    trial = load(save(), trial_class=WithArguments, trial_kwargs={"size": 3, "name": "x"})
    assert type(trial) is WithArguments
    assert (trial.size, trial.name) == (3, "x")


def test_class_given_needs_no_code(checkpoint: pathlib.Path) -> None:
    for path in (checkpoint / "code").iterdir():
        path.rename(checkpoint.parent / path.name)
    (checkpoint / "code").rmdir()
    assert type(load(checkpoint, LineTrial)) is LineTrial


def test_code_of_the_checkpoint_goes_before_that_of_this_process(checkpoint: pathlib.Path) -> None:
    code = program_in(checkpoint) / "trials.py"
    change_file(code, code.read_text() + "\n\nLineTrial.edition = 'saved'\n")
    assert load(checkpoint).edition == "saved"
    assert not hasattr(LineTrial, "edition")


def test_class_inside_a_class_is_found(checkpoint: pathlib.Path) -> None:
    code = program_in(checkpoint) / "trials.py"
    change_file(code, code.read_text() + "\n\nclass Outer:\n    class Inner(LineTrial):\n        pass\n")
    describe(checkpoint, trial_cls_spec="trials:Outer.Inner")
    assert type(load(checkpoint)).__qualname__ == "Outer.Inner"


# Programs of their own


TRIAL = """
import torch
from torch import nn
from determined import pytorch
from {parts} import make_model


class Own(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(make_model(context.get_hparam("width")))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.ones(4, 2), 2)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return loss

    def evaluate_batch(self, batch, batch_idx):
        return {{"validation_loss": self.model(batch).mean()}}
"""

MAIN = """
if __name__ == "__main__":
    with pytorch.init(hparams={"width": 3}) as context:
        trainer = pytorch.Trainer(Own(context), context)
        trainer.fit(max_length=pytorch.Batch(1))
"""

PARTS = """
from torch import nn


def make_model(width):
    return nn.Linear(2, width)
"""


def script(project: pathlib.Path) -> list[str]:
    (project / "train.py").write_text(TRIAL.format(parts="parts") + MAIN)
    (project / "parts.py").write_text(PARTS)
    return ["train.py"]


def module(project: pathlib.Path) -> list[str]:
    (project / "model.py").write_text(TRIAL.format(parts="parts"))
    (project / "parts.py").write_text(PARTS)
    (project / "train.py").write_text("from determined import pytorch\nfrom model import Own\n" + MAIN)
    return ["train.py"]


def package(project: pathlib.Path) -> list[str]:
    (project / "work" / "models").mkdir(parents=True)
    for folder in ("work", "work/models"):
        (project / folder / "__init__.py").touch()
    (project / "work" / "models" / "train.py").write_text(TRIAL.format(parts="..parts") + MAIN)
    (project / "work" / "parts.py").write_text(PARTS)
    return ["-m", "work.models.train"]


@pytest.mark.parametrize(
    ("write", "spec"), [(script, "train:Own"), (module, "model:Own"), (package, "work.models.train:Own")]
)
def test_trial_of_a_program_that_ran_by_itself_loads(
    write: Callable[[pathlib.Path], list[str]], spec: str, tmp_path: pathlib.Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    command = write(project)
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(det.__file__).parents[1])}
    done = forking.run(command, cwd=project, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "det-home" / "checkpoints").iterdir()
    assert json.loads((folder / "load_data.json").read_text())["trial_cls_spec"] == spec
    for path in project.rglob("*.py"):
        path.unlink()  # the checkpoint stands by itself
    trial = load(folder)
    assert trial.context.get_hparam("width") == 3
    assert torch.equal(trial.model.weight, state_in(folder)["models_state_dict"][0]["weight"])


# Traces


def test_loading_leaves_this_process_as_it_was(checkpoint: pathlib.Path) -> None:
    (program_in(checkpoint) / "only_in_the_checkpoint.py").touch()
    code = program_in(checkpoint) / "trials.py"
    change_file(code, code.read_text() + "\n\nimport only_in_the_checkpoint\n")
    paths, modules, bytecode = list(sys.path), dict(sys.modules), sys.dont_write_bytecode
    load(checkpoint)
    assert sys.path == paths
    assert sys.modules == modules
    assert sys.dont_write_bytecode == bytecode


def test_loading_that_fails_leaves_this_process_as_it_was(checkpoint: pathlib.Path) -> None:
    change_file(program_in(checkpoint) / "trials.py", "import json\n1 / 0\n")
    paths, modules = list(sys.path), dict(sys.modules)
    with pytest.raises(ZeroDivisionError):
        load(checkpoint)
    assert sys.path == paths
    assert sys.modules == modules


def test_loading_leaves_the_checkpoint_as_it_was(monkeypatch: pytest.MonkeyPatch, checkpoint: pathlib.Path) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = contents(checkpoint)
    load(checkpoint)
    assert contents(checkpoint) == before


def test_modules_of_two_checkpoints_do_not_mix() -> None:
    folders = save(), save()
    for number, folder in enumerate(folders):
        code = program_in(folder) / "trials.py"
        change_file(code, code.read_text() + f"\n\nLineTrial.number = {number}\n")
    assert [load(folder).number for folder in (*folders, folders[0])] == [0, 1, 0]


def test_folder_without_init_file_takes_the_place_of_another_such_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("here", "there"):
        (tmp_path / place / "bare_folder").mkdir(parents=True)
        (tmp_path / place / "bare_folder" / "inside.py").write_text(f"PLACE = {place!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    from bare_folder import inside

    with det.import_from_path(tmp_path / "there"):
        from bare_folder import inside as other
    assert (inside.PLACE, other.PLACE) == ("here", "there")
    assert sys.modules["bare_folder.inside"] is inside


# What cannot be loaded


def test_missing_folder_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing at .*absent"):
        load(tmp_path / "absent")


def test_file_instead_of_a_folder_is_refused() -> None:
    with pytest.raises(det.errors.InvalidCheckpointException, match=r"a file, not a folder, at .*state_dict\.pth"):
        load(save() / "state_dict.pth")


@pytest.mark.parametrize("name", ["load_data.json", "state_dict.pth"])
@pytest.mark.parametrize("options", [None, {"mmap": True}])
def test_missing_file_is_refused_naming_it(name: str, options: dict[str, Any] | None, checkpoint: pathlib.Path) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(det.errors.InvalidCheckpointException, match=name):
        load(checkpoint, torch_load_kwargs=options)


def test_missing_code_is_refused_with_the_way_out(checkpoint: pathlib.Path) -> None:
    (checkpoint / "code").rename(checkpoint / "gone")
    reseal(checkpoint)
    with pytest.raises(det.errors.InvalidCheckpointException, match="trial_class=YourTrial"):
        load(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"trial_type": "TFKerasTrial"}', "{}"])
def test_description_that_makes_no_sense_is_refused(text: str, checkpoint: pathlib.Path) -> None:
    change_file(checkpoint / "load_data.json", text)
    with pytest.raises(det.errors.InvalidCheckpointException, match=r"load_data\.json"):
        load(checkpoint)


@pytest.mark.parametrize(
    "spec",
    [
        "os:system",
        "subprocess:Popen",
        "builtins:exec",
        "..:x",
        "../trials:LineTrial",
        "/tmp/evil:LineTrial",
        "trials",
        "trials:",
        ":LineTrial",
        "trials:Line Trial",
        "trials:LineTrial()",
        "trials:nothing",
        "no_such_module_anywhere:LineTrial",
        "trials:line_data",
        "trials:LineTrial.train_batch",
        "",
        None,
        3,
    ],
)
def test_class_that_is_no_trial_is_refused(spec: Any, checkpoint: pathlib.Path) -> None:
    describe(checkpoint, trial_cls_spec=spec)
    with pytest.raises(det.errors.InvalidCheckpointException, match="trial_class=YourTrial"):
        load(checkpoint)


class OtherNames(LineTrial):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 1))


class TwoModels(LineTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.wrap_model(nn.Linear(1, 1))


@pytest.mark.parametrize("trial_class", [OtherNames, TwoModels])
def test_class_that_does_not_fit_the_weights_is_refused(trial_class: type[LineTrial], checkpoint: pathlib.Path) -> None:
    with pytest.raises(det.errors.InvalidCheckpointException, match="models_state_dict"):
        load(checkpoint, trial_class)


def test_weights_with_the_prefix_of_several_processes_load(checkpoint: pathlib.Path) -> None:
    weights = state_in(checkpoint)["models_state_dict"][0]
    change_state(checkpoint, models_state_dict=[{f"module.{name}": value for name, value in weights.items()}])
    assert torch.equal(load(checkpoint).model.weight, weights["weight"])


def test_checkpoint_without_import_paths_imports_from_its_code_folder(checkpoint: pathlib.Path) -> None:
    own = program_in(checkpoint)
    description = json.loads((checkpoint / "load_data.json").read_text())
    del description["import_paths"]
    if own != checkpoint / "code":
        (own / "trials.py").rename(checkpoint / "code" / "trials.py")
    change_file(checkpoint / "load_data.json", json.dumps(description))
    assert type(load(checkpoint)).__name__ == "LineTrial"


@pytest.mark.parametrize("paths", [["/"], ["../.."], [], "code", [1], None])
def test_import_paths_that_are_not_in_the_code_are_refused(paths: Any, checkpoint: pathlib.Path) -> None:
    describe(checkpoint, import_paths=paths)
    with pytest.raises(det.errors.InvalidCheckpointException, match="trial_class=YourTrial"):
        load(checkpoint)


# Options of torch.load


class Unusual:
    """A class of the user's, in a checkpoint that the user trusts."""


def test_options_reach_torch_load(checkpoint: pathlib.Path) -> None:
    change_state(checkpoint, callbacks={"mine": Unusual()})
    with pytest.raises(det.errors.InvalidCheckpointException, match="Unusual"):
        load(checkpoint, LineTrial)
    assert isinstance(load(checkpoint, LineTrial, torch_load_kwargs={"weights_only": False}), LineTrial)


def test_options_in_their_old_place_work_with_a_warning(checkpoint: pathlib.Path) -> None:
    change_state(checkpoint, callbacks={"mine": Unusual()})
    with pytest.warns(DeprecationWarning, match=r"torch_load_kwargs=\{'weights_only': False\}"):
        assert isinstance(load(checkpoint, LineTrial, weights_only=False), LineTrial)


class Nested(LineTrial):
    """Its model has one child, which is called as DDP calls what it wraps."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(OrderedDict(module=nn.Linear(4, 1)))


def test_model_whose_only_child_is_called_module_loads_and_resumes() -> None:
    folder = save(Nested)
    weights = state_in(folder)["models_state_dict"][0]
    assert torch.equal(load(folder, Nested).model.module.weight, weights["module.weight"])
    resumed = train(Nested, latest_checkpoint=folder)  # trained already
    assert torch.equal(resumed.model.module.weight, weights["module.weight"])
