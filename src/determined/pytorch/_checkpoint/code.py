"""Which of the user's files belong to a checkpoint."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterable
from typing import NamedTuple

from determined._import import installed_folders
from determined._secrets import mask_variables_in_file

logger = logging.getLogger("determined.pytorch")

MAX_FILE_BYTES = 1 << 20
MAX_TOTAL_BYTES = 32 << 20
_PACKAGES = ("site-packages", "dist-packages")
_LIBRARY = pathlib.Path(__file__).resolve().parents[2]


class Program(NamedTuple):
    """The program that a trial class comes from."""

    root: pathlib.Path | None
    """The folder of the whole program; None for a class without a file, or from an installed package."""
    import_paths: tuple[str, ...] = ()
    """The folders that the program imports from, relative to `root`, in the order of `sys.path`."""


def import_name(module: str) -> str:
    """Return the name that a module can be imported by: for the script that runs, the name of its file."""
    main = sys.modules.get(module)
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if module != "__main__" or not file:
        return module
    return str(spec.name) if spec else pathlib.Path(file).stem


def imported_module(name: str) -> types.ModuleType | None:
    """Return the module that `import_name` gives this name; None if it is not imported."""
    return sys.modules.get("__main__" if import_name("__main__") == name else name)


def program_modules(trial_class: type) -> list[str]:
    """Return the names of the imported modules that belong to a trial's program, without its libraries."""
    root = program_of(trial_class).root
    return sorted({import_name(trial_class.__module__), *(_imported(root) if root else ())})


def program_of(trial_class: type) -> Program:
    """Return where a trial class can be imported from."""
    file = getattr(sys.modules.get(trial_class.__module__), "__file__", None)
    if not file:
        return Program(None)
    own = _import_root(import_name(trial_class.__module__), pathlib.Path(file).resolve())
    if own.name in _PACKAGES or own in installed_folders():
        return Program(None)
    root = _git_root(own) or _common_root(own)
    entries = _import_folders(root)
    folders = entries if own in entries else [own, *entries]
    return Program(root, tuple(folder.relative_to(root).as_posix() for folder in folders))


def program_files(root: pathlib.Path, left_out: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Return the program's own files below its folder, as relative paths.

    These are the files that git tracks and the imported modules, except those below `left_out`, in an installation of
    Python, or larger than `MAX_FILE_BYTES`. If all together exceed `MAX_TOTAL_BYTES`, only the modules are returned.
    """
    belongs = _membership(root, left_out)
    modules = {path.relative_to(root) for path in _imported(root).values()}
    present = [path for path in sorted(_tracked(root) | modules) if (root / path).is_file()]
    files = [path for path in present if not (root / path).is_symlink() and belongs(path.parent)]
    sizes = {path: (root / path).stat().st_size for path in files}
    if too_large := [path for path, size in sizes.items() if size > MAX_FILE_BYTES]:
        logger.warning(
            "Checkpoints leave out %d file(s) of the program over %d KiB, the first being %s.",
            len(too_large),
            MAX_FILE_BYTES >> 10,
            too_large[0],
        )
    kept = [path for path, size in sizes.items() if size <= MAX_FILE_BYTES]
    if sum(sizes[path] for path in kept) <= MAX_TOTAL_BYTES:
        return kept
    kept = [path for path in kept if path in modules]
    logger.warning(
        "The program below %s is larger than %d MiB, so checkpoints hold only the %d modules that it imported.",
        root,
        MAX_TOTAL_BYTES >> 20,
        len(kept),
    )
    return kept


def copy_program(root: pathlib.Path, files: Iterable[pathlib.Path], target: pathlib.Path) -> None:
    """Copy the files into a folder under the same relative paths; mask environment variables in config files."""
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            masked = mask_variables_in_file(root / path)
            if masked is None:
                shutil.copyfile(root / path, target / path)
            else:
                (target / path).write_bytes(masked)
        except (FileNotFoundError, PermissionError, ValueError) as error:  # not worth losing the training for
            logger.warning("The checkpoint leaves out %s of the program: %s.", path, error)


def _import_root(name: str, file: pathlib.Path) -> pathlib.Path:
    """Return the folder that a module was imported from: for a package's module, the one that holds the package."""
    parents = file.parents
    return parents[min(name.count(".") + (file.name == "__init__.py"), len(parents) - 1)]


def _git_root(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the top of the git repository that tracks something in a folder."""
    if not _tracked(folder):  # for example, a home folder whose dotfiles are in git, but not this program
        return None
    top = pathlib.Path(os.fsdecode(_git("rev-parse", "--show-toplevel", folder=folder)).rstrip("\n"))
    return top if folder.is_relative_to(top) else None


def _tracked(root: pathlib.Path) -> set[pathlib.Path]:
    names = os.fsdecode(_git("ls-files", "-z", folder=root)).split("\0")
    return {pathlib.Path(name) for name in names if name}


def _git(*command: str, folder: pathlib.Path) -> bytes:
    """Return what git prints; nothing if there is no git, or no repository."""
    try:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""


def _common_root(own: pathlib.Path) -> pathlib.Path:
    """Return the folder that holds everything imported from the working folder, if that holds the trial."""
    try:
        working = pathlib.Path.cwd()
    except FileNotFoundError:  # somebody removed it
        return own
    folders = _import_folders(working) if own.is_relative_to(working) else []
    return pathlib.Path(os.path.commonpath([own, *folders]))


def _import_folders(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders below `root` from which the program's modules were imported, in the order of `sys.path`."""
    used = {_import_root(name, file) for name, file in _imported(root).items()}
    entries = dict.fromkeys(pathlib.Path(entry).resolve() for entry in sys.path if os.path.isdir(entry or "."))
    # The root of a package may be above `root`, if the working folder is inside the package.
    return [entry for entry in entries if entry in used and entry.is_relative_to(root)]


def _imported(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return the files of the program's imported modules below a folder, by the names of the modules."""
    belongs = _membership(root)
    # Most of the thousands of modules are installed: skip them by their paths, before any path is resolved.
    foreign = tuple(f"{folder}{os.sep}" for folder in _foreign_folders(root))
    found: dict[str, pathlib.Path] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py") or file.startswith(foreign):
            continue
        path = pathlib.Path(_real(os.path.dirname(file)), os.path.basename(file))
        if path.is_relative_to(root) and belongs(path.parent.relative_to(root)):
            found[import_name(name)] = path
    return found


_real = functools.cache(os.path.realpath)


def _foreign_folders(root: pathlib.Path, left_out: Iterable[pathlib.Path] = ()) -> set[pathlib.Path]:
    """Return the folders whose files are not the program's, except those that hold the program itself."""
    folders = {*(folder.resolve() for folder in left_out), *installed_folders(), _LIBRARY}
    return {folder for folder in folders if not root.is_relative_to(folder)}


def _membership(root: pathlib.Path, left_out: Iterable[pathlib.Path] = ()) -> Callable[[pathlib.Path], bool]:
    """Return a function of a folder, relative to `root`, that returns whether its files belong to the program."""
    foreign = _foreign_folders(root, left_out)

    @functools.cache
    def is_foreign(folder: pathlib.Path) -> bool:
        path = root / folder
        if path in foreign or path.name in _PACKAGES:
            return True
        return (path / "pyvenv.cfg").exists() or (path / "conda-meta").exists()

    return lambda folder: not any(is_foreign(one) for one in (folder, *folder.parents) if one != pathlib.Path())
