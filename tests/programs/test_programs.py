"""Small programs in the styles of public ones, run unchanged by `python` and by `det experiment create`.

Each folder beside this file is a program: `train.py`, which trains when it is run as a script and asserts what it
expects, and `experiment.yaml`, which `det experiment create` is given with the folder.
"""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

import determined
import forking

pytestmark = pytest.mark.process

PROGRAMS = sorted(path.parent.name for path in pathlib.Path(__file__).parent.glob("*/train.py"))


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the program, so that nothing is written beside the original."""
    source = pathlib.Path(__file__).parent / request.param
    return shutil.copytree(source, tmp_path / "program", ignore=shutil.ignore_patterns("__pycache__"))


def test_program_trains_under_python(program: pathlib.Path) -> None:
    run(program, "train.py")


@pytest.mark.parametrize(
    "program",
    [name if name == "plain" else pytest.param(name, marks=pytest.mark.thorough) for name in PROGRAMS],
    indirect=True,
)
def test_program_trains_as_an_experiment(program: pathlib.Path) -> None:
    output = run(program, "-m", "determined.cli", "experiment", "create", "experiment.yaml", ".", "--follow")
    assert "COMPLETED" in output, output


@pytest.mark.parametrize("program", ["plain"], indirect=True)
def test_program_whose_config_asks_for_many_slots_is_tested_on_one(program: pathlib.Path) -> None:
    slots = ("--config", "resources.slots_per_trial=4")
    output = run(program, "-m", "determined.cli", "e", "create", "experiment.yaml", ".", "--local", "--test", *slots)
    assert "The test passed" in output


def run(folder: pathlib.Path, *arguments: str) -> str:
    """Run Python in the program's folder, which must succeed, and return what it printed."""
    source = pathlib.Path(determined.__file__).parents[1]
    done = forking.run(
        arguments,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=forking.PIPE,
        stderr=forking.STDOUT,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
