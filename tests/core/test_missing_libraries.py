"""A run on a machine where libraries that are not at the heart of training cannot be imported."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.process

Run = Callable[..., "subprocess.CompletedProcess[str]"]

BLOCK = "import sys\nsys.modules.update(dict.fromkeys({libraries!r}))\n"

TRAIN = """
from determined import pytorch
from trials import LineTrial, trainer

with trainer(LineTrial) as (its_trainer, trial):
    its_trainer.fit(
        max_length=pytorch.Batch(4), reporting_period=pytorch.Batch(2), profiling_enabled={profiling}
    )
    print("ids", trial.context.get_experiment_id(), trial.context.get_trial_id())
    print("trained", trial.context.services.steps_completed)
    print("folder", trial.context.get_tensorboard_path())
    try:
        trial.context.get_tensorboard_writer()
    except ImportError as error:
        print("no writer:", error)
"""

CORE = """
from determined import core

with core.init() as context:
    context.train.report_training_metrics(1, {"loss": 1.0})
    context.train.report_validation_metrics(1, {"loss": 1.0})
    with context.checkpoint.store_path({"steps_completed": 1}) as (folder, _):
        (folder / "weights").touch()
    context.profiler.on()
    print("best", context.train.get_experiment_best_validation())
print("end")
"""


def without(*libraries: str) -> str:
    return BLOCK.format(libraries=libraries)


def test_training_needs_none_of_the_side_libraries(run_in_new_interpreter: Run, tmp_path: pathlib.Path) -> None:
    blocked = without("sqlalchemy", "psutil", "rich", "platformdirs", "tensorboard", "typer", "matplotlib")
    done = run_in_new_interpreter(blocked + TRAIN.format(profiling=False), DET_PROGRESS="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "ids 0 0" in lines
    assert "trained 4" in lines
    # Curves need no TensorBoard, a SummaryWriter does, and says so.
    (folder,) = (line.removeprefix("folder ") for line in lines if line.startswith("folder "))
    assert len(list(pathlib.Path(folder).glob("events.out.tfevents.*"))) == 1
    (refusal,) = (line for line in lines if line.startswith("no writer:"))
    assert "pip install tensorboard" in refusal
    assert len(list((tmp_path / "det-home" / "checkpoints").iterdir())) == 1


def test_run_that_is_not_recorded_says_so_once(run_in_new_interpreter: Run) -> None:
    done = run_in_new_interpreter(without("sqlalchemy") + TRAIN.format(profiling=False))
    assert done.returncode == 0, done.stderr
    assert "ids 0 0" in done.stdout.splitlines()
    assert done.stderr.count("This run is not recorded") == 1
    assert "`pip install sqlalchemy`" in done.stderr


@pytest.mark.parametrize("library", ["sqlalchemy", "psutil"])
def test_core_api_works_without(library: str, run_in_new_interpreter: Run) -> None:
    done = run_in_new_interpreter(without(library) + CORE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["best None", "end"]


@pytest.mark.thorough
def test_profiling_without_psutil_says_what_is_missing(run_in_new_interpreter: Run) -> None:
    done = run_in_new_interpreter(without("psutil") + TRAIN.format(profiling=True))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("The profiler leaves out CPU, memory, disk and network") == 1
    assert "Traceback" not in done.stderr


def test_run_is_on_record_without_a_report_though_its_start_does_not_wait_for_that(run_in_new_interpreter: Run) -> None:
    done = run_in_new_interpreter(
        "import sys, time\n"
        "from determined import core, tracking\n"
        "from determined._home import home\n"
        "with core.init():\n"
        "    print('sqlalchemy' in sys.modules)\n"
        "    while not home().database.exists() or not tracking.TrackingReader(home().database).experiments():\n"
        "        time.sleep(0.01)\n"
        "    print('on record')\n"
    )
    assert (done.stdout.split("\n"), done.returncode) == (["False", "on record", ""], 0), done.stderr
