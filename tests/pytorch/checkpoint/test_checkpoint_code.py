"""Which of the user's files a checkpoint takes along."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import shutil
import subprocess

import pytest

import determined as det
import forking
from determined import pytorch, tracking
from determined.pytorch import Batch
from saving import records, train

pytestmark = pytest.mark.process

PROGRAM = """
import sys
from determined import pytorch
sys.path.insert(0, {tests!r})
from trials import LineTrial, trainer
import helping.parts


class Own(LineTrial):
    pass


if __name__ == "__main__":
    with trainer(Own{storage}) as (its_trainer, trial):
        its_trainer.fit(max_length=pytorch.Batch(2), checkpoint_period=pytorch.Batch(1), checkpoint_policy="none")
"""


def write_program(folder: pathlib.Path, storage: str = "") -> pathlib.Path:
    """Write a program of a script and a package into a folder, with files around that are no part of it."""
    (folder / "helping").mkdir(parents=True)
    (folder / "helping" / "__init__.py").touch()
    (folder / "helping" / "parts.py").write_text("SIZE = 3\n")
    (folder / "unused.py").touch()
    (folder / "data.bin").write_bytes(bytes(10))
    script = folder / "train.py"
    script.write_text(PROGRAM.format(tests=forking.__file__.rpartition("/")[0], storage=storage))
    return script


def run_program(script: pathlib.Path, folder: pathlib.Path | None = None, **environment: str) -> str:
    """Run a program, in its own folder unless told otherwise, and return what it printed."""
    done = forking.run(
        [str(script)],
        cwd=folder or script.parent,
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(det.__file__).parents[1])} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def code_of(checkpoint: pathlib.Path) -> set[str]:
    code = checkpoint / "code"
    return {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}


def test_program_outside_git_is_the_imported_modules(tmp_path: pathlib.Path) -> None:
    run_program(write_program(tmp_path / "project"))
    first, second = (pathlib.Path(saved.path) for saved in records().checkpoints())
    assert code_of(first) == code_of(second) == {"train.py", "helping/__init__.py", "helping/parts.py"}
    assert json.loads((first / "load_data.json").read_text())["trial_cls_spec"] == "train:Own"


def test_program_reached_by_a_link_is_found(tmp_path: pathlib.Path) -> None:
    script = write_program(tmp_path / "project")
    (tmp_path / "link").symlink_to(script.parent)
    run_program(tmp_path / "link" / "train.py")
    code = code_of(pathlib.Path(records().checkpoints()[0].path))
    assert code == {"train.py", "helping/__init__.py", "helping/parts.py"}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_program_in_git_is_what_git_tracks_without_stores_environments_and_large_files(tmp_path: pathlib.Path) -> None:
    project = tmp_path / "project"
    script = write_program(
        project,
        storage=", exp_conf={'checkpoint_storage': {'type': 'directory', "
        f"'container_path': {str(project / 'store')!r}}}}}",
    )
    (project / "venv").mkdir()
    for name in ("notes.md", "venv/pyvenv.cfg", "venv/module.py", "store/old.txt", "home/old.txt"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("x")
    (project / "weights.bin").write_bytes(bytes(2 << 20))
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    subprocess.run(["git", "add", "-A"], cwd=project, check=True)
    (project / "untracked.md").touch()
    printed = run_program(script, DET_HOME=str(project / "home"))
    saved = tracking.TrackingReader(project / "home" / "tracking.db").checkpoints()
    assert [pathlib.Path(one.path).parent for one in saved] == [project / "store"] * 2
    expected = {"train.py", "helping/__init__.py", "helping/parts.py", "unused.py", "data.bin", "notes.md"}
    assert [code_of(pathlib.Path(one.path)) for one in saved] == [expected] * 2
    assert "weights.bin" in printed


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_checkpoint_has_no_values_of_environment_variables(tmp_path: pathlib.Path) -> None:
    project = tmp_path / "project"
    settings = {"environment": {"environment_variables": ["PIN=30517"]}}
    script = write_program(project, storage=", exp_conf=__import__('json').load(open('experiment.yaml'))")
    (project / "experiment.yaml").write_text(json.dumps(settings))
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    subprocess.run(["git", "add", "-A"], cwd=project, check=True)
    run_program(script)
    checkpoint = pathlib.Path(records().checkpoints()[0].path)
    assert not [path for path in checkpoint.rglob("*") if path.is_file() and b"30517" in path.read_bytes()]
    assert b"PIN=********" in (checkpoint / "load_data.json").read_bytes()
    assert b"PIN=********" in (checkpoint / "code" / "experiment.yaml").read_bytes()


def test_program_is_kept_when_its_folder_is_the_store(tmp_path: pathlib.Path) -> None:
    script = write_program(tmp_path / "project")
    run_program(script, DET_HOME=str(script.parent))
    saved = tracking.TrackingReader(script.parent / "tracking.db").checkpoints()
    expected = {"train.py", "helping/__init__.py", "helping/parts.py"}
    assert [code_of(pathlib.Path(one.path)) for one in saved] == [expected] * 2


def write_project(folder: pathlib.Path) -> pathlib.Path:
    """Write a program whose script lies beside the package that it imports."""
    script = write_program(folder / "scripts")
    shutil.move(folder / "scripts" / "helping", folder / "helping")
    (folder / "README.md").touch()
    return_to_top = f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
    script.write_text(return_to_top + script.read_text())
    return script


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_program_in_a_subfolder_of_git_is_the_whole_of_what_git_tracks(tmp_path: pathlib.Path) -> None:
    project = tmp_path / "project"
    script = write_project(project)
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    subprocess.run(["git", "add", "README.md", "scripts/train.py"], cwd=project, check=True)
    run_program(script)
    saved = pathlib.Path(records().checkpoints()[0].path)
    assert code_of(saved) == {"README.md", "scripts/train.py", "helping/__init__.py", "helping/parts.py"}
    assert json.loads((saved / "load_data.json").read_text())["import_paths"] == [".", "scripts"]
    shutil.rmtree(project)
    assert type(pytorch.load_trial_from_checkpoint_path(saved)).__name__ == "Own"


def test_program_in_a_subfolder_of_the_working_folder_is_all_that_it_imported(tmp_path: pathlib.Path) -> None:
    project = tmp_path / "project"
    run_program(write_project(project), folder=tmp_path)
    saved = pathlib.Path(records().checkpoints()[0].path)
    assert code_of(saved) == {"scripts/train.py", "helping/__init__.py", "helping/parts.py"}
    shutil.rmtree(project)
    assert type(pytorch.load_trial_from_checkpoint_path(saved)).__name__ == "Own"


def test_working_folder_inside_the_package_is_no_obstacle(tmp_path: pathlib.Path) -> None:
    script = write_program(tmp_path / "project")
    run_program(script, folder=tmp_path / "project" / "helping")
    saved = pathlib.Path(records().checkpoints()[0].path)
    assert code_of(saved) == {"train.py", "helping/__init__.py", "helping/parts.py"}


def test_module_of_a_package_around_the_working_folder_is_no_obstacle(tmp_path: pathlib.Path) -> None:
    inner = tmp_path / "outer" / "inner"
    script = write_program(inner)
    script.write_text(
        f"import sys\nsys.path.append({str(tmp_path)!r})\nimport outer.inner.unused\n" + script.read_text()
    )
    run_program(script)
    saved = pathlib.Path(records().checkpoints()[0].path)
    assert code_of(saved) == {"train.py", "unused.py", "helping/__init__.py", "helping/parts.py"}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_repository_around_a_program_that_it_does_not_track_is_left_out(tmp_path: pathlib.Path) -> None:
    around = tmp_path / "around"
    script = write_program(around / "project")
    (around / "settings").write_text("secret")
    subprocess.run(["git", "init", "-q"], cwd=around, check=True)
    subprocess.run(["git", "add", "settings"], cwd=around, check=True)
    run_program(script)
    saved = pathlib.Path(records().checkpoints()[0].path)
    assert code_of(saved) == {"train.py", "helping/__init__.py", "helping/parts.py"}


def test_file_of_the_program_that_vanishes_does_not_end_training(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "vanishing.py").write_text("from trials import LineTrial\n\nclass Own(LineTrial): ...\n")

    class Vanish(pytorch.PyTorchCallback):
        def on_checkpoint_upload_end(self, uuid: str) -> None:
            shutil.rmtree(project, ignore_errors=True)

    with det.import_from_path(project):
        own = importlib.import_module("vanishing").Own
        own.build_callbacks = lambda self: {"vanish": Vanish()}
        train(own, max_length=Batch(2), checkpoint_period=Batch(1))
    codes = [code_of(pathlib.Path(saved.path)) for saved in records().checkpoints()]
    assert codes == [{"vanishing.py"}, set()]
    assert "leaves out vanishing.py" in caplog.text
