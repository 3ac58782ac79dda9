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
import types
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from determined._secrets import mask_variables_in_file

logger = logging.getLogger("determined.pytorch")

LARGEST_FILE = 1 << 20
LARGEST_TOTAL = 32 << 20
_DEEPEST = 100  # folders whose names are looked at one by one, recursively
_PACKAGES = ("site-packages", "dist-packages")
_LIBRARY = pathlib.Path(__file__).resolve().parents[1]

_libraries: set[str] = set()  # names of modules


def take_for_libraries(modules: Iterable[str]) -> None:
    """Let modules be known as none of the program's, as those that were imported before the program was chosen."""
    _libraries.update(set(modules) - {"__main__"})


class Program(NamedTuple):
    """Where a trial class comes from: the folder of its program and the name of its module there."""

    root: pathlib.Path | None
    """The folder of the whole program; None for a class without a file, or from an installed package."""
    module: str
    import_paths: tuple[str, ...] = ()
    """The folders that the program imports from, relative to `root`, in the order of the search."""


def import_name(module: str) -> str:
    """Return the name that a module can be imported by; the script that runs counts as the module of its name."""
    main = sys.modules.get(module)
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if module != "__main__" or not file:
        return module
    return str(spec.name) if spec else pathlib.Path(file).stem


def imported_module(name: str) -> types.ModuleType | None:
    """Return the module that `import_name` gives a name; None if it is not imported."""
    return sys.modules.get("__main__" if import_name("__main__") == name else name)


def program_modules(trial_class: type) -> list[str]:
    """Return the names of the modules that belong to the program of a trial and are imported, without its libraries."""
    root = program_of(trial_class).root
    if root is None:
        return [module_of(trial_class)]
    belongs = _membership(root, [])
    below = {name for name, path in _modules_below(root) if belongs(path.parent.relative_to(root))}
    return sorted({module_of(trial_class), *below})


def module_of(trial_class: type) -> str:
    """Return the name of the module that a class can be imported from; a script counts as the module of its name."""
    return import_name(trial_class.__module__)


def program_of(trial_class: type) -> Program:
    """Return where a trial class can be imported from; a script counts as the module of its name."""
    name = module_of(trial_class)
    file = getattr(sys.modules.get(trial_class.__module__), "__file__", None)
    if not file:
        return Program(None, name)
    own = _import_root(name, pathlib.Path(file).resolve())
    if _is_installed(own):
        return Program(None, name)
    root = _git_root(own) or _common_root(own)
    entries = _import_folders(root)
    folders = entries if own in entries else [own, *entries]
    return Program(root, name, tuple(folder.relative_to(root).as_posix() for folder in folders))


def program_files(root: pathlib.Path, left_out: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Return the program's own files below its folder, as relative paths.

    Those that git tracks and the modules imported from there; never what is in `left_out`, in an installation
    of Python or too large.
    """
    belongs = _membership(root, left_out)
    files = sorted(path for path in _tracked(root) | _imported(root) if _is_plain(root / path) and belongs(path.parent))
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
    """Copy the files into a folder, keeping their places, but configs without values of environment variables."""
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            masked = mask_variables_in_file(root / path)
            if masked is None:
                shutil.copyfile(root / path, target / path)
            else:
                (target / path).write_bytes(masked)
        except (FileNotFoundError, PermissionError, ValueError) as error:  # no reason to lose the training
            logger.warning("The checkpoint leaves out %s of the program: %s.", path, error)


def _import_root(name: str, file: pathlib.Path) -> pathlib.Path:
    parents = file.parents
    return parents[min(name.count(".") + (file.name == "__init__.py"), len(parents) - 1)]


def _git_root(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the top of the git repository that tracks something in a folder."""
    if not _tracked(folder):  # as a home folder whose settings are in git, but not this program
        return None
    top = pathlib.Path(os.fsdecode(_git("rev-parse", "--show-toplevel", folder=folder)).rstrip("\n"))
    return top if folder.is_relative_to(top) else None


def _common_root(own: pathlib.Path) -> pathlib.Path:
    """Return the folder that holds all that was imported from the working folder, if that holds the trial."""
    try:
        working = pathlib.Path.cwd()
    except FileNotFoundError:  # somebody removed it
        return own
    folders = _import_folders(working) if own.is_relative_to(working) else []
    return pathlib.Path(os.path.commonpath([own, *folders]))


def _import_folders(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders below `root` from which modules were imported, in the order of the search."""
    belongs = _membership(root, [])
    used = {_import_root(name, file) for name, file in _modules_below(root)}
    entries = dict.fromkeys(pathlib.Path(entry).resolve() for entry in sys.path if os.path.isdir(entry or "."))
    # The root of a package may lie above, where the working folder is one of the package's own.
    below = [entry for entry in entries if entry in used and entry.is_relative_to(root)]
    return [entry for entry in below if belongs(entry.relative_to(root))]


def _git(*command: str, folder: pathlib.Path) -> bytes:
    """Return what git answers; nothing if there is no git, or no repository."""
    try:
        answer = subprocess.run(["git", *command], cwd=folder, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return answer.stdout if answer.returncode == 0 else b""


def _tracked(root: pathlib.Path) -> set[pathlib.Path]:
    names = os.fsdecode(_git("ls-files", "-z", folder=root)).split("\0")
    return {pathlib.Path(name) for name in names if name}


def _imported(root: pathlib.Path) -> set[pathlib.Path]:
    return {file.relative_to(root) for _, file in _modules_below(root)}


def _modules_below(root: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    # Some thousand modules share few folders, and most of those are elsewhere: told before paths are made.
    for name in sys.modules.keys() - _libraries:
        file = getattr(sys.modules.get(name), "__file__", None)
        if not file or not file.endswith(".py"):
            continue
        folder = _real(os.path.dirname(file))
        if not folder.startswith(str(root)):
            continue
        path = pathlib.Path(folder, os.path.basename(file))
        if path.is_relative_to(root) and not path.is_relative_to(_LIBRARY):
            yield import_name(name), path


@functools.cache
def _real(folder: str) -> str:
    """Return a folder without symbolic links, as `os.path.realpath` does, with one look at each part of a path."""
    parent, name = os.path.split(folder)
    is_plain = name not in ("", ".", "..") and parent.startswith(os.sep) and not os.path.islink(folder)
    if not is_plain or folder.count(os.sep) > _DEEPEST:
        return os.path.realpath(folder)
    return os.path.join(_real(parent), name)


def _membership(root: pathlib.Path, left_out: Iterable[pathlib.Path]) -> Callable[[pathlib.Path], bool]:
    """Return the function that says of a folder, given relative to `root`, whether its files are the program's."""
    installed = map(pathlib.Path, (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()))
    folders = {folder.resolve() for folder in (*left_out, *installed, _LIBRARY)}
    # What holds the program itself cannot be meant.
    banned = {folder for folder in folders if not root.is_relative_to(folder)}

    @functools.cache
    def is_foreign(folder: pathlib.Path) -> bool:
        return root / folder in banned or _is_environment(root / folder)

    return lambda folder: not any(is_foreign(one) for one in (folder, *folder.parents) if one != pathlib.Path())


def _is_plain(path: pathlib.Path) -> bool:
    return path.is_file() and not path.is_symlink()


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
