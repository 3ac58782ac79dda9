"""Take a snapshot of the folder that holds a program."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import re
import shutil
import stat
from collections.abc import Iterable, Iterator

from determined import errors
from determined._home import home, make_private
from determined._secrets import mask_variables_in_file
from determined.experiment._detignore import Ignore

IGNORE_FILE = ".detignore"
LIMIT = 95 << 20
"""The most bytes of a snapshot."""
MAX_DEPTH = 100
"""The most folders within each other in a snapshot."""

# What no program needs; a line such as !.venv/ in the ignore file takes one of these back.
DEFAULTS = (
    *(".git", ".hg/", ".svn/", "__pycache__/", "*.py[co]", ".DS_Store"),
    *(".venv/", "venv/", ".tox/", ".nox/", "node_modules/", ".ipynb_checkpoints/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", ".idea/", ".vscode/"),
)
_MAX_COUNTED = 50_000
"""Entries after which the exact size of a folder that is too large is not worth counting."""
_MAX_SHOWN = 8
_MAIN_SHARE = 0.8
_MIN_SHOWN_SIZE = 100 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """One thing to copy: a folder, a file, or a link if there is a target."""

    path: str
    source: str
    status: os.stat_result
    target: str | None = None

    @property
    def is_folder(self) -> bool:
        return self.target is None and stat.S_ISDIR(self.status.st_mode)

    @property
    def size(self) -> int:
        return self.status.st_size if self.target is None and not self.is_folder else 0


def take(
    folder: str | os.PathLike[str],
    destination: pathlib.Path,
    includes: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """Copy a program's folder to a new folder; nothing stays of it on failure.

    Left out is what `.detignore` names, in the syntax of `.gitignore`, what no program needs, such as .git and virtual
    environments, and the home folder. Links stay links if they point into the folder, or to nothing; others are
    followed. `includes` are further files and folders, which keep their names in the copy. The limit is 95 MB. The copy
    of an experiment config has no values of `environment_variables`.
    """
    root = pathlib.Path(folder)
    if not root.is_dir():
        raise errors.InvalidExperimentException(f"There is no folder {str(root)!r} to copy the program from.")
    entries = _Survey(root, destination).entries()
    for include in includes:
        entries += _included(pathlib.Path(include), destination, {entry.path for entry in entries})
    if (size := sum(entry.size for entry in entries)) > LIMIT:
        raise errors.InvalidExperimentException(_too_large(str(root), entries, size, is_complete=True))
    make_private(destination.parent)
    destination.mkdir(mode=0o700)
    try:
        _copy(entries, destination)
        _sync(destination)
    except BaseException:
        shutil.rmtree(destination, ignore_errors=True)
        raise


def _included(path: pathlib.Path, destination: pathlib.Path, taken: set[str]) -> list[_Entry]:
    """Return what to copy of a file or folder beside the program's folder."""
    source = path.resolve()
    if not source.is_dir() and not source.is_file():
        raise errors.InvalidExperimentException(f"There is no file or folder {str(path)!r} to include.")
    if source.name in taken:
        raise errors.InvalidExperimentException(
            f"{str(path)!r} cannot be included: the program has a {source.name!r} already; rename one of them."
        )
    top = _Entry(source.name, str(source), source.stat())
    if not top.is_folder:
        return [top]
    inner = _Survey(source, destination).entries()
    return [top, *(dataclasses.replace(entry, path=f"{source.name}/{entry.path}") for entry in inner)]


class _Survey:
    """Lists everything in a folder before anything is copied."""

    def __init__(self, root: pathlib.Path, destination: pathlib.Path) -> None:
        self._root = str(root)
        self._real_root = os.path.realpath(root)
        self._left_out = {os.path.realpath(path) for path in (destination, home().path)}
        self._ignore = Ignore([*DEFAULTS, *_lines_of(root / IGNORE_FILE)])
        self._problems: list[str] = []
        self._found: list[_Entry] = []
        self._size = 0

    def entries(self) -> list[_Entry]:
        """Return what to copy, each folder before its contents; the error names all that cannot be."""
        is_complete = True
        for entry in self._within(self._root, "", [self._real_root]):
            self._found.append(entry)
            self._size += entry.size
            if self._size > LIMIT and len(self._found) > _MAX_COUNTED:
                is_complete = False
                break
        if self._size > LIMIT:
            raise errors.InvalidExperimentException(_too_large(self._root, self._found, self._size, is_complete))
        if self._problems:
            raise errors.InvalidExperimentException(_cannot(self._root, self._problems))
        return self._found

    def _within(self, folder: str, path: str, above: list[str]) -> Iterator[_Entry]:
        if path.count("/") >= MAX_DEPTH:
            self._problems.append(f"{path.split('/')[0]}: its folders are nested more than {MAX_DEPTH} deep")
            return
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            self._problems.append(f"{path or '.'}: {error.strerror}")
            return
        for name in names:
            source = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                yield from self._entry(source, f"{path}/{name}" if path else name, above)

    def _entry(self, source: str, path: str, above: list[str]) -> Iterator[_Entry]:
        status = os.lstat(source)
        if stat.S_ISLNK(status.st_mode):
            yield from self._link(source, path, status, above)
        elif not self._is_left_out(source, path, status):
            yield from self._thing(source, path, status, above)

    def _thing(self, source: str, path: str, status: os.stat_result, above: list[str]) -> Iterator[_Entry]:
        if stat.S_ISDIR(status.st_mode):
            yield _Entry(path, source, status)
            yield from self._within(source, path, above)
        elif not stat.S_ISREG(status.st_mode):
            self._problems.append(f"{path}: it is neither a file nor a folder")
        elif not os.access(source, os.R_OK):
            self._problems.append(f"{path}: Permission denied")
        else:
            yield _Entry(path, source, status)

    def _link(self, source: str, path: str, status: os.stat_result, above: list[str]) -> Iterator[_Entry]:
        if self._ignore.excludes(path, is_folder=False):
            return
        real = os.path.realpath(source)
        try:
            beyond = os.stat(source)
        except OSError:  # it points to nothing, or to itself
            yield _Entry(path, source, status, os.readlink(source))
            return
        if len(above) == 1 and _is_below(real, self._real_root):
            yield _Entry(path, source, status, _inner_target(source, real, self._root, self._real_root))
        elif self._is_left_out(source, path, beyond):
            return
        elif stat.S_ISDIR(beyond.st_mode) and any(_is_below(other, real) for other in above):
            self._problems.append(f"{path}: it is a link to a folder that it is in, {real}")
        else:
            yield from self._thing(source, path, beyond, [*above, real])

    def _is_left_out(self, source: str, path: str, status: os.stat_result) -> bool:
        is_folder = stat.S_ISDIR(status.st_mode)
        if self._ignore.excludes(path, is_folder=is_folder):
            return True
        return is_folder and (os.path.realpath(source) in self._left_out or _is_environment(source))


def _lines_of(path: pathlib.Path) -> list[str]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise errors.InvalidExperimentException(f"{path} cannot be read: {error.strerror}.") from None
    lines = text.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape").split("\n")
    return [line.removesuffix("\r") for line in lines]


def _is_environment(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, mark)) for mark in ("pyvenv.cfg", "conda-meta"))


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _inner_target(source: str, real: str, root: str, real_root: str) -> str:
    """Return what a link within the folder shall point to in the copy of the folder."""
    target = os.readlink(source)
    here = os.path.relpath(os.path.dirname(source), root)
    stays = not os.path.isabs(target) and not os.path.normpath(os.path.join(here, target)).startswith("..")
    return target if stays else os.path.relpath(real, os.path.join(real_root, here))


def _copy(entries: list[_Entry], target: pathlib.Path) -> None:
    for entry in entries:
        path = os.path.join(target, entry.path)
        try:
            _copy_one(entry, path)
        except ValueError as error:
            raise errors.InvalidExperimentException(
                f"{entry.source} cannot be part of an experiment's code: {error}, or name the file in {IGNORE_FILE}."
            ) from None
        except FileNotFoundError:
            if os.path.lexists(entry.source):  # else it was removed meanwhile
                raise
        except OSError as error:
            raise errors.InvalidExperimentException(
                f"{entry.source} cannot be copied to {target.parent}: {error.strerror or error}."
            ) from error


def _copy_one(entry: _Entry, path: str) -> None:
    if entry.target is not None:
        os.symlink(entry.target, path)
        return
    if entry.is_folder:
        os.mkdir(path, 0o700)
        return
    masked = mask_variables_in_file(pathlib.Path(entry.source))
    if masked is None:
        shutil.copyfile(entry.source, path)
    else:
        pathlib.Path(path).write_bytes(masked)
    os.chmod(path, stat.S_IMODE(entry.status.st_mode) & 0o700 | 0o400)  # for nobody else
    os.utime(path, ns=(entry.status.st_atime_ns, entry.status.st_mtime_ns))


def _sync(folder: pathlib.Path) -> None:
    """Wait until everything is on the disk, with one call for all files where the system has one."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        syncfs = getattr(ctypes.CDLL(None), "syncfs", None)
        if syncfs is None or syncfs(descriptor) != 0:
            os.sync()
    finally:
        os.close(descriptor)


# Messages


def _cannot(root: str, problems: list[str]) -> str:
    lines = [f"{len(problems)} thing(s) in {root} cannot be part of an experiment's code:"]
    lines += [f"  {problem}" for problem in problems[:_MAX_SHOWN]]
    lines += [f"  and {len(problems) - _MAX_SHOWN} more"] * (len(problems) > _MAX_SHOWN)
    first = problems[0].rpartition(": ")[0]
    return "\n".join([*lines, f"Remove them, or name them in {os.path.join(root, IGNORE_FILE)}, such as /{first}"])


def _too_large(root: str, entries: list[_Entry], size: int, is_complete: bool) -> str:
    whole = f"{_megabytes(size)}" if is_complete else f"more than {_megabytes(size)}"
    lines = [f"The code in {root} is too large for an experiment: {whole}, where {_megabytes(LIMIT)} are allowed."]
    lines.append(f"Name what the program does not need in {os.path.join(root, IGNORE_FILE)}. The largest parts:")
    return "\n".join([*lines, *(f"{_megabytes(its_size):>12}  {name}" for name, its_size in _largest(entries))])


def _largest(entries: list[_Entry]) -> list[tuple[str, int]]:
    """Return the largest entries at the top, narrowed down to what makes them large, as lines of the ignore file."""
    sizes: dict[str, int] = {}
    inner: dict[str, list[str]] = {}
    for entry in entries:
        parent = os.path.dirname(entry.path)
        inner.setdefault(parent, []).append(entry.path)
        path = entry.path
        while path:
            sizes[path] = sizes.get(path, 0) + entry.size
            path = os.path.dirname(path)
    folders = {entry.path for entry in entries if entry.is_folder}
    found = []
    for path in sorted(inner.get("", []), key=sizes.__getitem__, reverse=True)[:_MAX_SHOWN]:
        while largest := max(inner.get(path, []), key=sizes.__getitem__, default=None):
            if sizes[largest] < _MAIN_SHARE * sizes[path]:
                break
            path = largest
        found.append((_line_for(path, path in folders), sizes[path]))
    return [(line, size) for line, size in found if size >= _MIN_SHOWN_SIZE]


def _line_for(path: str, is_folder: bool) -> str:
    return "/" + re.sub(r"([\\*?\[])", r"\\\1", path) + "/" * is_folder


def _megabytes(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MB"
