"""Which GPUs the trials of experiments get that run at the same time on one machine."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from determined import errors
from determined._home import Home
from determined.experiment import config as configs
from determined.experiment import create, drive
from determined.experiment.executors import RunSpec
from determined.tracking import RunState
from simulation import SimulatedExecutor

pytestmark = pytest.mark.timeout(60)

LISTED = """\
GPU 0: NVIDIA A100 (UUID: GPU-aaaaaaaa-1111)
GPU 1: NVIDIA A100 (UUID: GPU-bbbbbbbb-2222)
GPU 2: NVIDIA A100 (UUID: GPU-cccccccc-3333)
  MIG 3g.20gb     Device  0: (UUID: MIG-dddddddd-4444)
  MIG 3g.20gb     Device  1: (UUID: MIG-eeeeeeee-5555)
"""


@pytest.fixture
def nvidia_smi(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with three GPUs, as far as `nvidia-smi` tells."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def validating(hparams: Mapping[str, Any], seed: int) -> Iterator[tuple[float, Mapping[str, float]]]:
    yield 1.0, {"loss": 1.0}


class Machines(SimulatedExecutor):
    """Notes the GPUs of its one trial, and drives the experiments beside it as long as that trial holds them."""

    def __init__(self, lab: Lab, id: int, beside: list[str]) -> None:
        super().__init__(id, lab.home.database, validating)
        self._lab = lab
        self._beside = beside

    def start(self, spec: RunSpec) -> None:
        self._lab.given.append(list(map(str, spec.placement["gpus"])))
        if self._beside:
            self._lab.run(*self._beside)
        super().start(spec)


class Lab:
    """Experiments of one trial each, in one home folder."""

    def __init__(self, folder: pathlib.Path, patch: pytest.MonkeyPatch) -> None:
        self.home = Home(folder / "home")
        self.code = folder / "code"
        self.code.mkdir()
        (self.code / "train.py").touch()
        self.given: list[list[str]] = []
        self._patch = patch

    def run(self, visible: str, *beside: str, slots_per_trial: int = 1) -> None:
        """Drive an experiment by a runner with this CUDA_VISIBLE_DEVICES, and others while its trial runs."""
        self._patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        settings = {
            "entrypoint": "python3 train.py",
            "searcher": {"name": "single", "metric": "loss"},
            "resources": {"slots_per_trial": slots_per_trial},
        }
        id = create(configs.from_map(settings), self.code, at=self.home)
        executor = Machines(self, id, list(beside))
        assert drive(id, self.home, executor) is RunState.COMPLETED
        executor.close()


@pytest.fixture
def lab(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("visible", "given"),
    [
        (["2,3", "3,2"], [["2"], ["3"]]),
        (["0", "1"], [["0"], ["1"]]),
        (["0,1", "1,2", "0,1,2"], [["0"], ["1"], ["2"]]),
    ],
)
def test_runners_that_see_different_gpus_never_share_one(lab: Lab, visible: list[str], given: list[list[str]]) -> None:
    lab.run(*visible)
    assert lab.given == given


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize(
    ("visible", "given"),
    [
        (["GPU-bbbbbbbb-2222"], [["GPU-bbbbbbbb-2222"]]),
        (["GPU-bb"], [["GPU-bb"]]),
        (["MIG-dddddddd-4444", "MIG-dddddddd-4444,MIG-eeeeeeee-5555"], [["MIG-dddddddd-4444"], ["MIG-eeeeeeee-5555"]]),
        (["1", "GPU-bbbbbbbb-2222,GPU-aaaaaaaa-1111"], [["1"], ["GPU-aaaaaaaa-1111"]]),
    ],
)
def test_gpus_are_known_by_their_uuids(lab: Lab, visible: list[str], given: list[list[str]]) -> None:
    lab.run(*visible)
    assert lab.given == given


@pytest.mark.parametrize("visible", ["", "-1", "none", "-1,0"])
def test_no_gpu_is_used_if_all_are_hidden(lab: Lab, visible: str) -> None:
    lab.run(visible)
    assert lab.given == [[]]


def test_a_gpu_counts_once(lab: Lab) -> None:
    with pytest.raises(errors.InvalidExperimentException, match="this machine has 1 slots"):
        lab.run("4,4", slots_per_trial=2)


@pytest.mark.usefixtures("nvidia_smi")
def test_a_uuid_that_is_not_there_is_refused(lab: Lab) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=r"CUDA_VISIBLE_DEVICES='GPU-ffff'.*nvidia-smi -L"):
        lab.run("GPU-ffff")
