"""`det experiment create --local --test`: check a program before a long run."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from determined import experiment, tracking
from determined._text import plain_lines
from determined.cli import _output

if TYPE_CHECKING:
    from determined.experiment import TestRun
    from determined.experiment.config import ExperimentConfig


def try_out(config: ExperimentConfig, folder: pathlib.Path, includes: Iterable[pathlib.Path]) -> None:
    """Train one batch of one trial and print the result; exit status 1 if it failed."""
    first = experiment.first_trial(config, folder)
    hparams = _output.plain(tracking.encode_json(first.hparams), limit=1000)
    entrypoint = _output.plain(config.entrypoint)
    if config.trial_class:
        typer.echo(f"Training one batch of {entrypoint} in this process, on a copy of the program, with {hparams}")
    else:
        typer.echo(f"Running on a copy of the program: {entrypoint}\nwith {hparams}")
        typer.echo("Trainer.fit trains one batch (DET_TEST_MODE=1); a loop of your own runs to its end.")
    if (slots := config.resources.slot_range.max) > 1:
        typer.echo(f"The test runs on one slot; resources.slots_per_trial: {slots} is ignored.")
    began = time.monotonic()
    result = experiment.run_test(config, folder, first, includes)
    _print_result(result, time.monotonic() - began)


def _print_result(result: TestRun, seconds: float) -> None:
    if result.exit.reason is not experiment.executors.EndReason.COMPLETED:
        typer.echo(f"Error: the test failed: {plain_lines(result.exit.message, limit=2000)}", err=True)
        raise typer.Exit(1)
    for report in result.reports:
        typer.echo(f"{_output.plain(report.group)}: {_output.plain(tracking.encode_json(report.metrics), limit=1000)}")
    made = f"{len(result.reports)} reports of metrics and {result.checkpoints} checkpoints"
    typer.echo(f"The test passed in {seconds:.1f} seconds, with {made}. None of them are kept.")
