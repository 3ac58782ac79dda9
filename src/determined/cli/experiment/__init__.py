"""`det experiment`: create, follow, control and show experiments."""

from __future__ import annotations

import typer

from determined.cli._arguments import add

from . import _control, _create, _details, _listing, _preview, _results

app = typer.Typer(help="Experiments: the trials of one program, or one run of a training script.", no_args_is_help=True)
_label = typer.Typer(help="Add and remove labels.", no_args_is_help=True)
_set = typer.Typer(
    help="Change the name, description, notes, project or limits of an experiment.", no_args_is_help=True
)

add(app, _create.create, example="det experiment create adaptive.yaml . --follow")
add(app, _create.continue_experiment, "continue", example="det experiment continue 3 --follow")
add(app, _listing.list_experiments, "list", example="det experiment list --limit 10", short="ls")
add(app, _listing.describe, example="det experiment describe 3", short="desc")
add(app, _listing.print_config, "config", example="det experiment config 3 > again.yaml")
add(app, _listing.list_trials, "list-trials", example="det experiment list-trials 3 --best", short="lt")
add(
    app,
    _listing.list_checkpoints,
    "list-checkpoints",
    example="det experiment list-checkpoints 3 --best",
    short="lc",
)
add(app, _results.logs, example="det experiment logs 3 --follow")
add(app, _results.plot, example="det experiment plot 3 --output curves.png")
add(app, _results.download, example="det experiment download 3 --top-n 2 --output-dir best")
add(
    app,
    _results.download_model_def,
    "download-model-def",
    example="det experiment download-model-def 3 --output-dir programs",
)
add(app, _control.pause, example="det experiment pause 3")
add(app, _control.activate, example="det experiment activate 3 --follow")
add(app, _control.cancel, example="det experiment cancel 3")
add(app, _control.kill, example="det experiment kill 3")
add(app, _control.wait, example="det experiment wait 3 && det experiment download 3")
add(app, _details.archive, example="det experiment archive 1 2")
add(app, _details.unarchive, example="det experiment unarchive 1")
add(app, _control.delete, example="det experiment delete 3")
add(_label, _details.add_label, "add", example="det experiment label add 3 baseline")
add(_label, _details.remove_label, "remove", example="det experiment label remove 3 baseline")
add(_set, _details.set_name, "name", example="det experiment set name 3 digits")
add(_set, _details.set_description, "description", example='det experiment set description 3 "with dropout"')
add(_set, _details.set_notes, "notes", example='det experiment set notes 3 "too noisy"')
add(_set, _details.set_project, "project", example="det experiment set project 3 vision digits")
add(_set, _details.set_max_slots, "max-slots", example="det experiment set max-slots 3 2")
add(_set, _details.set_priority, "priority", example="det experiment set priority 3 10")
app.add_typer(_label, name="label")
app.add_typer(_set, name="set")

preview_search = _preview.preview_search

__all__ = ["app", "preview_search"]
