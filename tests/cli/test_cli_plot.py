from __future__ import annotations

import math
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from determined import tracking
from determined.cli import _plot

Det = Callable[..., Any]


def report(step: int, group: str, **metrics: Any) -> tracking.MetricReport:
    return tracking.MetricReport(group=group, steps_completed=step, metrics=metrics, time=0.0)


def test_a_plot_is_a_picture(det: Det, finished: Any, tmp_path: pathlib.Path) -> None:
    assert det("trial", "plot", 1, "--output", tmp_path / "curves.png").exit_code == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_is_named_after_its_trial(
    det: Det, finished: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    det("trial", "plot", 1)
    assert (tmp_path / "trial-1.png").exists()


def test_a_plot_labels_curves_axes_and_panels(det: Det, finished: Any, tmp_path: pathlib.Path) -> None:
    det("trial", "plot", 1, "--output", tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    for label in ("digits, trial 1", "loss", "training", "validation", "batches trained"):
        assert f"<!-- {label} -->" in drawn


def test_hostile_names_are_drawn_as_text(det: Det, hostile: Any, tmp_path: pathlib.Path) -> None:
    result = det("trial", "plot", 1, "--output", tmp_path / "curves.png")
    assert (result.exit_code, result.stderr) == (0, "")


def test_an_unknown_format_is_refused(det: Det, finished: Any, tmp_path: pathlib.Path) -> None:
    result = det("trial", "plot", 1, "--output", tmp_path / "curves.bmp")
    assert result.exit_code == 1
    assert ".png, .svg, .pdf" in result.stderr


def test_a_folder_that_is_not_there_is_one_line_on_stderr(det: Det, finished: Any, tmp_path: pathlib.Path) -> None:
    result = det("trial", "plot", 1, "--output", tmp_path / "absent" / "curves.png")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "absent" in result.stderr


def test_a_trial_without_numbers_cannot_be_plotted(det: Det, start: Callable[..., Any]) -> None:
    start().close()
    result = det("trial", "plot", 1)
    assert result.exit_code == 1
    assert "no numbers" in result.stderr


@pytest.mark.thorough
def test_more_metrics_than_fit_are_named(det: Det, start: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    with start() as recorder:
        recorder.write([report(1, "training", **{f"m{index}": 1.0 for index in range(62)})])
    result = det("trial", "plot", 1, "--output", tmp_path / "curves.svg")
    assert result.stderr == "Not plotted, for lack of space: m60, m61\n"


def test_without_matplotlib_the_remedy_is_shown(finished: Any, tmp_path: pathlib.Path) -> None:
    program = "import sys; sys.modules['matplotlib'] = None\nimport determined.cli; determined.cli.main()"
    command = [sys.executable, "-c", program, "trial", "plot", "1", "-o", str(tmp_path / "a.png")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "pip install 'resolute[plot]'" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["loss", "val_loss", "validation_loss"])
def test_a_validation_shares_the_panel_of_the_training_metric(name: str) -> None:
    panels = _plot.arrange([report(1, "training", loss=2.0), report(1, "validation", **{name: 1.0})])
    assert panels == {"loss": {"training": {1: 2.0}, "validation": {1: 1.0}}}


def test_validation_names_that_would_collide_stay_apart() -> None:
    panels = _plot.arrange([report(1, "validation", loss=2.0, val_loss=1.0)])
    assert set(panels) == {"loss", "val_loss"}


def test_the_step_counters_and_what_is_not_a_number_get_no_panel() -> None:
    reports = [report(1, "training", batches=1, epochs=0.5, note="text", flag=True, nested={"a": 1})]
    assert _plot.arrange(reports) == {}


def test_a_later_report_of_a_step_replaces_the_earlier() -> None:
    panels = _plot.arrange([report(1, "training", loss=2.0), report(1, "training", loss=3.0)])
    assert panels["loss"]["training"] == {1: 3.0}


@pytest.mark.parametrize("value", [math.inf, math.nan, 10**400])
def test_a_value_that_is_not_finite_leaves_a_gap(value: float) -> None:
    panels = _plot.arrange([report(1, "training", loss=value)])
    assert math.isnan(panels["loss"]["training"][1])


@pytest.fixture
def continued(start: Callable[..., tracking.TrialWriter], finished: tracking.CheckpointSaved) -> None:
    """A run that goes on from the checkpoint of the finished one, at step 20 of which 10 were reported."""
    with start() as recorder:
        recorder.write(
            [
                tracking.Continued(checkpoint=finished.uuid, steps_completed=20, reported_steps=10),
                report(20, "training", loss=0.75),
                report(30, "training", loss=0.5),
            ]
        )


def test_curve_of_a_continued_trial_is_that_of_one_run(det: Det, continued: None) -> None:
    rows = det("trial", "describe", 2, "--metrics", "--csv").stdout.splitlines()
    header = rows[0].split(",")
    cells = [dict(zip(header, row.split(","), strict=True)) for row in rows[1:]]
    training = [(cell["step"], cell["loss"]) for cell in cells if cell["group"] == "training"]
    assert training == [("10", "2.0"), ("20", "0.75"), ("30", "0.5")]
    assert [cell["step"] for cell in cells if cell["group"] == "validation"] == ["20"]


def test_tables_of_a_continued_trial_show_groups_that_only_the_earlier_run_reported(det: Det, continued: None) -> None:
    assert "validation" in det("trial", "describe", 2, "--metrics").stdout


def test_plot_of_a_continued_trial_has_the_curves_of_the_earlier_run(
    det: Det, continued: None, tmp_path: pathlib.Path
) -> None:
    assert det("trial", "plot", 2, "--output", tmp_path / "curves.svg").exit_code == 0
    assert "<!-- validation -->" in (tmp_path / "curves.svg").read_text()
