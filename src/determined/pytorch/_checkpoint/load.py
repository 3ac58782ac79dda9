"""Builds a trial from a checkpoint, to inspect or use its models."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from determined import errors, storage
from determined._import import import_from_path
from determined._packages import explained
from determined.pytorch._checkpoint import format as checkpoint_format
from determined.pytorch._checkpoint import legacy, objects
from determined.pytorch._checkpoint.parts import load_models
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._trial import PyTorchTrial


class CheckpointLoadContext(PyTorchTrialContext):
    """A context for a trial that is loaded from a checkpoint, without a run."""

    def __init__(self, hparams: Mapping[str, Any] | None = None, exp_conf: Mapping[str, Any] | None = None) -> None:
        super().__init__(hparams=hparams, exp_conf=exp_conf)


def load_trial_from_checkpoint_path(
    path: str | os.PathLike[str],
    trial_class: type[PyTorchTrial] | None = None,
    trial_kwargs: dict[str, Any] | None = None,
    torch_load_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> PyTorchTrial:
    """Return the trial of a checkpoint folder, or of the URL of a checkpoint, with the saved weights in its models.

    Without `trial_class`, the class is imported from the checkpoint's `code/` folder, which RUNS that code:
    load only checkpoints that you trust, or pass the class. `trial_kwargs` are further arguments of its
    constructor; `torch_load_kwargs` are passed to `torch.load`, such as `{"map_location": "cpu"}`.
    """
    if kwargs:
        warnings.warn(
            f"load_trial_from_checkpoint_path(**{kwargs!r}) is deprecated; pass torch_load_kwargs={kwargs!r}.",
            DeprecationWarning,
            stacklevel=2,
        )
    with contextlib.ExitStack() as opened:
        if isinstance(path, str) and "://" in path:
            folder = opened.enter_context(storage.open_at(path)).folder
        else:
            folder = checkpoint_format.existing_folder(path)
        return _load(folder, trial_class, trial_kwargs or {}, kwargs | (torch_load_kwargs or {}))


def _load(
    folder: pathlib.Path,
    trial_class: type[PyTorchTrial] | None,
    trial_kwargs: Mapping[str, Any],
    torch_load_kwargs: Mapping[str, Any],
) -> PyTorchTrial:
    checkpoint_format.verify(folder, with_code=trial_class is None)
    description = _description(folder)
    context = CheckpointLoadContext(description.get("hparams"), description.get("experiment_config"))
    with contextlib.ExitStack() as stack:
        if trial_class is None:
            import_paths = _import_paths(folder, description)
            for path in reversed(import_paths):  # the last one entered is searched first
                stack.enter_context(import_from_path(path))
            trial_class = _trial_class(folder, description, import_paths)
        trial = trial_class(context, **trial_kwargs)
    state = checkpoint_format.read(folder, **torch_load_kwargs)
    load_models(context, state, objects.Rules())
    return trial


def _description(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / checkpoint_format.LOAD_FILE
    try:
        if not path.exists() and legacy.is_legacy(folder):
            path, description = folder / legacy.METADATA_FILE, legacy.description(folder)
        else:
            description = storage.read_json(pathlib.Path(os.path.realpath(path)))
    except (OSError, ValueError) as error:
        raise errors.InvalidCheckpointException(f"{path} cannot be read as JSON: {error}") from error
    if (kind := description.get("trial_type")) != "PyTorchTrial":
        raise errors.InvalidCheckpointException(f"{path} describes a {kind!r}; only a PyTorchTrial can be loaded.")
    for name in ("hparams", "experiment_config"):
        if not isinstance(description.get(name), dict | None):
            raise errors.InvalidCheckpointException(f"{path} holds {name}={description[name]!r}, not a mapping.")
    return description


def _import_paths(folder: pathlib.Path, description: Mapping[str, Any]) -> list[pathlib.Path]:
    """Return the folders of the checkpoint that its program imports from; older ones have only `code/`."""
    code = folder / checkpoint_format.CODE_FOLDER
    if not code.is_dir():
        raise errors.InvalidCheckpointException(
            f"{folder} holds no {checkpoint_format.CODE_FOLDER}/ with the trial's program; pass trial_class=YourTrial."
        )
    code = code.resolve()
    names = description.get("import_paths", ["."])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise errors.InvalidCheckpointException(
            f"import_paths={names!r} in {folder / checkpoint_format.LOAD_FILE} is not a list of folders of "
            f"{checkpoint_format.CODE_FOLDER}/; pass trial_class=YourTrial."
        )
    # Not Path.is_dir(), which raises for names that no folder can have.
    paths = [(code / name).resolve() for name in names if os.path.isdir(code / name)]
    return [path for path in paths if path.is_relative_to(code)]


def _trial_class(
    folder: pathlib.Path, description: Mapping[str, Any], import_paths: list[pathlib.Path]
) -> type[PyTorchTrial]:
    spec = description.get("trial_cls_spec")
    module, _, qualname = str(spec).partition(":")
    if module == "__main__":
        module = _script_module(qualname, import_paths) or module
    if not all(part.isidentifier() for part in (*module.split("."), *qualname.split("."))):
        raise errors.InvalidCheckpointException(
            f"The trial class {spec!r} that {folder} names is not of the form module:Class; pass trial_class=YourTrial."
        )
    tops = [path / module.partition(".")[0] for path in import_paths]
    if not any(top.is_dir() or top.with_suffix(".py").is_file() for top in tops):
        # Otherwise any module that this process can import would run.
        raise errors.InvalidCheckpointException(
            f"The module of the trial class {spec!r} is not in {folder / checkpoint_format.CODE_FOLDER}; "
            "pass trial_class=YourTrial."
        )
    try:
        found: Any = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise errors.InvalidCheckpointException(
            f"The trial class {spec!r} cannot be imported from {folder / checkpoint_format.CODE_FOLDER} "
            f"({explained(str(error))}); pass trial_class=YourTrial."
        ) from error
    if not (isinstance(found, type) and issubclass(found, PyTorchTrial)):
        raise errors.InvalidCheckpointException(
            f"{spec!r} in {folder} is not a PyTorchTrial; pass trial_class=YourTrial."
        )
    return found


def _script_module(qualname: str, import_paths: list[pathlib.Path]) -> str | None:
    """Return the module that defines the class of the spec `__main__:Class`; None unless exactly one does."""
    name = qualname.partition(".")[0]
    files = [path for folder in import_paths for path in sorted(folder.glob("*.py"))]
    found = [path.stem for path in files if name in _classes_in(path)]
    return found[0] if len(found) == 1 else None


def _classes_in(path: pathlib.Path) -> set[str]:
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    return {statement.name for statement in body if isinstance(statement, ast.ClassDef)}
