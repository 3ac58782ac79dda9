"""Which of the user's files belong to a checkpoint."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from typing import NamedTuple

logger = logging.getLogger("determined.pytorch")

LARGEST_FILE = 1 << 20
LARGEST_TOTAL = 32 << 20
_PACKAGES = ("site-packages", "dist-packages")


class Program(NamedTuple):
    """Where a trial class comes from: its import root and the name of its module there."""

    root: pathlib.Path | None
    """The folder to import from; None for a class without a file, or from an installed package."""
    module: str


def program_of(trial_class: type) -> Program:
    """Return where a trial class can be imported from; a script counts as the module of its name."""
    module = sys.modules.get(trial_class.__module__)
    file = getattr(module, "__file__", None)
    spec = getattr(module, "__spec__", None)
    name = trial_class.__module__
    if name == "__main__" and file:
        name = spec.name if spec else pathlib.Path(file).stem
    if not file:
        return Program(None, name)
    path = pathlib.Path(file).resolve()
    levels = name.count(".") + (path.name == "__init__.py")
    root = path.parents[levels]
    return Program(None if _is_installed(root) else root, name)


def program_files(root: pathlib.Path, left_out: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Return the program's own files below its import root, as relative paths.

    Those that git tracks and the modules imported from there; never what is in `left_out`, in an installation
    of Python or too large.
    """
    installed = map(pathlib.Path, (sys.prefix, sys.base_prefix))
    # What holds the program itself cannot be meant.
    banned = [folder.resolve() for folder in (*left_out, *installed) if not root.is_relative_to(folder.resolve())]
    found = _tracked(root) | _imported(root)
    files = sorted(path for path in found if _belongs(root / path, root, banned))
    kept = [path for path in files if (root / path).stat().st_size <= LARGEST_FILE]
    if len(kept) < len(files):
        skipped = sorted(set(files) - set(kept))
        logger.warning(
            "Checkpoints leave out %d file(s) of the program over %d KiB, the first being %s.",
            len(skipped),
            LARGEST_FILE >> 10,
            skipped[0],
        )
    return _within_total(root, kept)


def copy_program(root: pathlib.Path, files: Iterable[pathlib.Path], target: pathlib.Path) -> None:
    """Copy the files into a folder, keeping their places."""
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(root / path, target / path)
        except (FileNotFoundError, PermissionError) as error:  # no reason to lose the training
            logger.warning("The checkpoint leaves out %s of the program: %s.", path, error)


def _tracked(root: pathlib.Path) -> set[pathlib.Path]:
    try:
        answer = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    names = answer.stdout.decode(errors="surrogateescape").split("\0") if answer.returncode == 0 else []
    return {pathlib.Path(name) for name in names if name}


def _imported(root: pathlib.Path) -> set[pathlib.Path]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    # Some thousand modules share few folders, and most of those are elsewhere: told before paths are made.
    real = functools.cache(os.path.realpath)
    places = {(real(os.path.dirname(file)), os.path.basename(file)) for file in files if file and file.endswith(".py")}
    below = (pathlib.Path(folder, name) for folder, name in places if folder.startswith(str(root)))
    return {path.relative_to(root) for path in below if path.is_relative_to(root)}


def _belongs(path: pathlib.Path, root: pathlib.Path, banned: list[pathlib.Path]) -> bool:
    if not path.is_file() or path.is_symlink():
        return False
    folders = [folder for folder in path.parents if folder != root and folder.is_relative_to(root)]
    return not any(folder in banned or _is_environment(folder) for folder in folders)


def _is_environment(folder: pathlib.Path) -> bool:
    return folder.name in _PACKAGES or any((folder / mark).exists() for mark in ("pyvenv.cfg", "conda-meta"))


def _within_total(root: pathlib.Path, files: list[pathlib.Path]) -> list[pathlib.Path]:
    if sum((root / path).stat().st_size for path in files) <= LARGEST_TOTAL:
        return files
    modules = sorted(_imported(root).intersection(files))
    logger.warning(
        "The program below %s is larger than %d MiB, so checkpoints hold only the %d modules that it imported.",
        root,
        LARGEST_TOTAL >> 20,
        len(modules),
    )
    return modules


def _is_installed(root: pathlib.Path) -> bool:
    places = {pathlib.Path(path).resolve() for path in sysconfig.get_paths().values()}
    return root in places or root.name in _PACKAGES
