"""Which libraries the forkserver imports for a program."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from cases import every
from determined.experiment.executors.local._program import FORKABLE, libraries_of

pytestmark = pytest.mark.process

_PROGRAM = """
import importlib, sys, threading

for name in sys.argv[1:]:
    importlib.import_module(name)
    assert threading.active_count() == 1, name
assert not sys.modules["torch"].cuda.is_initialized()
"""


def written(folder: pathlib.Path, **files: str) -> pathlib.Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_known_libraries_that_modules_import_are_found(tmp_path: pathlib.Path) -> None:
    code = written(tmp_path, model="import sklearn.datasets\nfrom scipy import stats\n", data="import pandas as pd\n")
    assert libraries_of(code) == ["pandas", "sklearn.datasets", "scipy", "scipy.stats"]


def test_libraries_that_nobody_knows_to_be_forkable_are_left_to_the_trial(tmp_path: pathlib.Path) -> None:
    assert libraries_of(written(tmp_path, model="import jax\nimport helpers\nfrom . import scipy\n")) == []


def test_what_is_imported_only_later_is_left_to_the_trial(tmp_path: pathlib.Path) -> None:
    assert libraries_of(written(tmp_path, model="def load():\n    import sklearn\n")) == []


def test_a_module_of_the_program_is_not_a_library(tmp_path: pathlib.Path) -> None:
    assert libraries_of(written(tmp_path, yaml="", model="import yaml\n")) == []


def test_a_module_that_cannot_be_read_is_passed_over(tmp_path: pathlib.Path) -> None:
    assert libraries_of(written(tmp_path, broken="import (", model="import scipy\n")) == ["scipy"]


def test_known_libraries_start_no_threads_and_touch_no_gpu() -> None:
    installed = sorted(name for name in FORKABLE if importlib.util.find_spec(name))
    assert {"numpy", "torch"} <= set(installed)
    subprocess.run([sys.executable, "-c", _PROGRAM, *installed], check=True, timeout=120)


THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize("starts", every(2, [THREAD, "pass"]))
def test_a_process_with_threads_is_not_forked(starts: str, tmp_path: pathlib.Path) -> None:
    written(tmp_path, surprising=starts)
    program = (
        "import sys\n"
        "from determined.experiment.executors.local import _forkserver\n"
        "_forkserver._import_libraries(['surprising'])\n"
        "print('warm:', _forkserver.HARNESS in sys.modules, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, timeout=120)
    assert f"warm: {starts == 'pass'}" in done.stdout.decode()
