"""`det preview-search`: the trials of a search and their cost."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from determined import experiment
from determined.cli import _output
from determined.cli._arguments import Csv, Json, Overrides


def preview_search(
    config: Annotated[
        pathlib.Path, typer.Argument(metavar="CONFIG", help="The experiment config, a YAML or JSON file.")
    ],
    overrides: Overrides = None,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """Show how many trials a search would run, and for how long, without running any."""
    format = _output.chosen_format(json, csv)
    loaded = experiment.config.load(config, overrides or ())
    shown = experiment.search.preview(loaded.searcher, loaded.hyperparameters, loaded.seed, config.absolute().parent)
    if format is _output.Format.JSON:
        _output.print_json({**_output.as_data(shown), "training": shown.training})
        return
    if format is _output.Format.CSV:
        _output.print_csv(shown.header, shown.table())
        return
    _output.print_table(shown.header, shown.table(), title=f"{shown.searcher}: {_trials(shown.trials)}")
    if shown.training is not None:
        typer.echo(f"All trials together train for {shown.training:,} {shown.unit or 'units'}.")
    if shown.first:
        names = list(dict.fromkeys(name for hparams in shown.first for name in hparams))
        rows = [[hparams.get(name) for name in names] for hparams in shown.first]
        _output.print_table(names, rows, title="First trials")


def _trials(count: int | None) -> str:
    return "any number of trials" if count is None else f"{count:,} trial{'s' * (count != 1)}"
