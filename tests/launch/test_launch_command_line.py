"""What the launcher makes of its command line, and what it refuses before anything starts."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from determined.launch.torch_distributed import main

TRIAL = "--trial model_def:Trial --config experiment.yaml"


@pytest.fixture
def refused(project: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Returns what is said about a command line that cannot be carried out."""
    (project / "there.py").touch()
    (project / "experiment.yaml").write_text("searcher: {max_length: 3}")

    def run(words: str) -> str:
        assert main(words.split()) == 2
        return capfd.readouterr().err

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "there is no script to run"),
        ("--nproc-per-node 2 --", "there is no script to run"),
        ("gone.py --lr 1", "there is no script 'gone.py' in "),
        ("no-such-program x", "'no-such-program' is neither a Python script nor a program"),
        ("--nproc-per-node 2 there.py", "--nproc-per-node ... -- script.py"),
        ("--nproc-per-node 2 stray -- there.py", "'stray' before -- is not an option of torchrun"),
        ("--nproc-per-node 0 -- there.py", "give a number of at least 1"),
        ("--nproc-per-node many -- there.py", "many"),
        ("--nnodes 2:1 -- there.py", "min_nodes"),
        ("--trial model_def:Trial", "--trial needs --config experiment.yaml"),
        ("--trial model_def", "write module:Class, such as model_def:MyTrial"),
        ("--trial model_def:Trial --config gone.yaml", "--config gone.yaml: it cannot be read"),
        ("--config experiment.yaml", "--config goes with --trial"),
        (f"{TRIAL} --lr 1", "--lr is not understood here"),
    ],
)
def test_refuses(words: str, said: str, refused: Callable[[str], str]) -> None:
    assert said in refused(words)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("min_validation_peroid: 3", "Did you mean min_validation_period?"),
        ("searcher: {name: single}", "write, for example, searcher: {max_length: {epochs: 3}}"),
        ("searcher: {max_length: {epochs: 0}}", 'line 1: searcher.max_length = {"epochs": 0}: a training of length 0'),
        ("searcher: {max_length: {hours: 3}}", "searcher.max_length.hours: there is no such key here"),
        (
            "{searcher: {max_length: 3}, min_checkpoint_period: often}",
            'min_checkpoint_period = "often": it is not a length',
        ),
        ("{searcher: {max_length: 3}, hyperparameters: {a: {b: {type: int, minval: 1, maxval: 3}}}}", "write a.b: 0.1"),
        ("[1, 2]", "an experiment config is a map"),
        ("a: b: c", "it is not YAML"),
        ("searcher: 3", "searcher = 3: it is not a mapping"),
    ],
)
def test_refuses_config(config: str, said: str, project: pathlib.Path, refused: Callable[[str], str]) -> None:
    (project / "experiment.yaml").write_text(config)
    assert said in refused(TRIAL)


def test_help_shows_usage_and_options_of_torchrun(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capfd.readouterr().out
    assert "[torchrun options --] script.py" in shown
    assert "--max-restarts" in shown
