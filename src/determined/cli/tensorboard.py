"""`det tensorboard`: TensorBoard on the files of trials."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from determined import _home, errors, storage
from determined.tracking import TrackingReader

from . import _output
from ._arguments import add, complete_experiment, complete_trial

_REFRESH_S = 30.0

app = typer.Typer(help="TensorBoard: curves, images and profiles of trials in a browser.", no_args_is_help=True)


def start(
    ids: Annotated[
        list[int] | None,
        typer.Argument(metavar="ID...", help="The ids of experiments.", autocompletion=complete_experiment),
    ] = None,
    trials: Annotated[
        list[int] | None,
        typer.Option(
            "--trial", "-t", metavar="ID", help="The id of a trial; can be repeated.", autocompletion=complete_trial
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The port. (default: the first free one from 6006)")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
) -> None:
    """Serve TensorBoard for experiments and trials until Ctrl-C."""
    if not ids and not trials:
        raise typer.BadParameter("give the id of an experiment, or --trial with the id of a trial.")
    with tempfile.TemporaryDirectory(prefix="det-tensorboard-") as copies:
        folders, fetch = _folders(ids or [], trials or [], pathlib.Path(copies))
        with _gathered(folders) as folder, _served(folder, host, port) as url:
            typer.echo(f"TensorBoard is at {url}. Ctrl-C stops it.")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(_REFRESH_S)
                    for again in fetch:
                        with contextlib.suppress(errors.StorageException):  # it may work the next time
                            again()


def _folders(
    ids: list[int], trials: list[int], copies: pathlib.Path
) -> tuple[dict[str, pathlib.Path], list[Callable[[], int]]]:
    """Return the folders to show, by name, and what fetches those again that are copies from a checkpoint store."""
    records, home = _output.open_records(), _home.home()
    chosen: dict[str, tuple[int, int | None]] = {f"experiment-{id}": (records.experiment(id).id, None) for id in ids}
    for id in trials:
        trial = records.trial(id)
        chosen[f"experiment-{trial.experiment_id}/trial-{id}"] = (trial.experiment_id, id)
    found, missing = dict[str, pathlib.Path](), []
    fetches: list[Callable[[], int]] = []
    for name, (experiment_id, trial_id) in chosen.items():
        folder = home.tensorboards(experiment_id) if trial_id is None else home.tensorboard(experiment_id, trial_id)
        if not folder.is_dir() and isinstance(store := _store_of(records, experiment_id), storage.FsspecStore):
            folder = copies / name
            prefix = home.tensorboard_prefix(experiment_id, trial_id)
            fetches.append(functools.partial(store.get_tree, prefix, folder))
            fetches[-1]()
        found[name] = folder
        if not folder.is_dir():
            missing.append(name)
    if missing:
        raise errors.InvalidRequestException(
            f"there are no TensorBoard files of {', '.join(missing)} under {str(home.path)!r}; trials write them when "
            "they report their first metrics."
        )
    return found, fetches


def _store_of(records: TrackingReader, experiment_id: int) -> storage.CheckpointStore:
    """Return where the checkpoints of an experiment are."""
    section = (records.experiment(experiment_id).config or {}).get("checkpoint_storage")
    of_checkpoints = [storage.locate(one.path)[0] for one in records.checkpoints(experiment_id)[-1:]]
    return of_checkpoints[0] if of_checkpoints else storage.store_for(section, _home.home().checkpoints)


@contextlib.contextmanager
def _gathered(folders: dict[str, pathlib.Path]) -> Iterator[pathlib.Path]:
    """Yield one folder that contains all of them."""
    if len(folders) == 1:
        yield next(iter(folders.values()))
        return
    with tempfile.TemporaryDirectory(prefix="det-tensorboard-") as root:
        for name, folder in folders.items():
            link = pathlib.Path(root, name.replace("/", "-"))
            link.symlink_to(folder, target_is_directory=True)
        yield pathlib.Path(root)


@contextlib.contextmanager
def _served(folder: pathlib.Path, host: str, port: int | None) -> Iterator[str]:
    """Yield the URL of a TensorBoard for a folder."""
    import logging
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that it uses
        from tensorboard import default, program  # type: ignore[import-untyped]  # has no types
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server: Any = program.TensorBoard(plugins=default.get_plugins())
    arguments = ["det tensorboard", "--logdir", str(folder), "--host", host]
    server.configure(argv=arguments if port is None else [*arguments, "--port", str(port)])
    try:
        yield str(server.launch())
    except program.TensorBoardServerException as error:
        raise errors.TrackingException(f"TensorBoard cannot start: {error.msg}") from error


add(app, start, example="det tensorboard start 3 4")
