"""The examples run as a reader would run them, and their records say what their READMEs promise."""

from __future__ import annotations

import io
import os
import pathlib

import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]  # has no types

import forking
from determined import tracking

pytestmark = pytest.mark.process

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    """Run the example as a program of its own and return all that it printed."""
    command = [str(EXAMPLES / name / "train.py"), *arguments]
    done = forking.run(command, stdout=forking.PIPE, stderr=forking.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def home() -> pathlib.Path:
    return pathlib.Path(os.environ["DET_HOME"])


def records() -> tracking.TrackingReader:
    return tracking.TrackingReader(home() / "tracking.db")


def drawn_image(tag: str) -> npt.NDArray[np.uint8]:
    """Return the latest image that the trial wrote for TensorBoard under this tag, as (height, width, RGB)."""
    (file,) = (home() / "tensorboard").rglob("*tfevents*")
    events = EventAccumulator(str(file))
    events.Reload()
    png = events.Images(tag)[-1].encoded_image_string
    return np.asarray(PIL.Image.open(io.BytesIO(png)).convert("RGB"))


def test_digits_reaches_97_percent() -> None:
    run_example("digits")
    best = records().trial(1).best_validation
    assert best is not None
    assert best.metric == "validation_accuracy"
    assert best.value >= 0.97


def test_digits_continues_from_the_checkpoint_it_names() -> None:
    run_example("digits", "--epochs", "1")
    (checkpoint,) = records().checkpoints(trial_id=1)
    output = run_example("digits", "--epochs", "2", "--latest-checkpoint", checkpoint.uuid)
    assert checkpoint.uuid in output
    assert records().trial(2).steps_completed == 2 * checkpoint.steps_completed


def test_gan_measures_its_modes_and_draws_its_points() -> None:
    run_example("gan", "--epochs", "1")
    assert records().trial(1).summary["validation"].keys() >= {"modes_covered", "high_quality"}
    assert drawn_image("generated points").min() == 0


def test_char_lm_predicts_better_than_by_chance_and_prints_a_sample() -> None:
    output = run_example("char_lm", "--batches", "40")
    bits = records().trial(1).summary["validation"]["validation_bits_per_character"]
    assert bits.largest is not None
    assert bits.latest < bits.largest - 1
    assert "The harbour " in output


def test_metrics_records_the_results_of_every_reducer() -> None:
    run_example("metrics", "--epochs", "1")
    assert records().trial(1).summary["validation"].keys() >= {
        "validation_loss",
        "misread",
        "validation_loss_90th_percentile",
        "accuracy",
        "worst_class_recall",
        "validation_auroc",
    }


@pytest.mark.thorough
def test_metrics_draws_into_tensorboard() -> None:
    run_example("metrics", "--epochs", "1")
    assert len(drawn_image("misread digits")) > 0
    red, _, blue = drawn_image("confusion matrix").astype(int).transpose(2, 0, 1)
    assert (blue - red).max() > 50, "the matrix has no cell that is clearly above zero"
