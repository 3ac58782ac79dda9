"""The benchmarks start, and those that they compare do the same work; what they measure is no business of a test."""

from __future__ import annotations

import pathlib
import runpy
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("[!_]*.py"))


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let benchmarks find their own modules, and leave nothing of them behind."""
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield
    for name, module in list(sys.modules.items()):
        if name not in before and str(BENCHMARKS) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def peers() -> ModuleType:
    import peers

    return peers


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_tells_how_to_run_it(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    assert end.value.code == 0
    assert f"python benchmarks/{script}" in capsys.readouterr().out


def test_the_benchmark_of_a_gpu_can_be_tried_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--cpu", "--only", "MLP", "--batches", "8", "--rounds", "1"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / "gpu.py"), run_name="__main__")
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines if "us a batch" in line][:2] == ["plain loop", "Resolute"]


@pytest.mark.thorough
def test_the_plain_loop_and_ours_do_the_same_work_and_tell_what_it_took(
    peers: ModuleType, tmp_path: pathlib.Path
) -> None:
    with peers.entered([peers.PLAIN, peers.OURS], tmp_path) as entrants, peers.working(entrants) as workers:
        peers.check_same_work(workers)
        took = [worker.ask(job, 2) for worker in workers for job in peers.JOBS]
    assert all(answer["cpu"] > 0 and answer["wall"] > 0 for answer in took)


@pytest.mark.parametrize("found", [{"steps": 1, "values": [0.5]}, {"steps": 2, "values": [0.25]}])
def test_a_contender_with_other_results_is_not_measured(peers: ModuleType, found: dict[str, object]) -> None:
    with pytest.raises(SystemExit, match=r"other work|optimizer steps"):
        peers.check_same_result("somebody", "training", found, {"steps": 2, "values": [0.5]})


def test_each_round_begins_with_another_contender(peers: ModuleType) -> None:
    assert "".join(peers.turns("abc", 3)) == "abcbcacab"


def test_a_table_shows_differences_round_by_round_and_who_cannot_take_part(peers: ModuleType) -> None:
    column = peers.Column("training", "us", {"plain": [10.0, 20.0, 90.0], "one": [11.0, 22.0, 93.0], "two": []})
    plain, one, two = peers.table(column, "plain").splitlines()[1:]
    assert plain.split()[:2] == ["plain", "20.0"]
    assert one.split() == ["one", "22.0", "(16.5", "to", "57.5)", "+2.0", "(+1.5", "to", "+2.5)", "1.10"]
    assert two.split() == ["two", "-"]
