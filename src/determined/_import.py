"""Import a program's modules from a folder without leaving traces in this process."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import sys
import sysconfig
import types
from collections.abc import Iterator


@contextlib.contextmanager
def import_from_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make imports inside the block come first from the folder `path`.

    Modules imported from that folder are forgotten when the block ends, so two folders may hold different
    modules of the same name; objects taken from them stay usable. Nothing is written to the folder.

        with det.import_from_path("checkpoint/code"):
            import model_def
    """
    folder = pathlib.Path(path).resolve()
    if not folder.is_dir():
        raise FileNotFoundError(f"import_from_path({str(path)!r}): there is no such folder to import from.")
    before = _forget({name for name in sys.modules if _is_shadowed(name, folder)})
    kept = dict(sys.modules)
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_bytecode
        with contextlib.suppress(ValueError):  # a program may have removed it by itself
            sys.path.remove(str(folder))
        new = {name: module for name, module in sys.modules.items() if kept.get(name) is not module}
        _forget({name for name, module in new.items() if _comes_from(name, module, folder)})
        sys.modules.update(before)


def _is_shadowed(name: str, folder: pathlib.Path) -> bool:
    """Say whether the folder has its own top-level module of this (already imported) name."""
    top = name.partition(".")[0]
    if top in sys.builtin_module_names or top in ("__main__", "determined"):
        return False
    if (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file():
        return True
    # A folder without __init__.py takes the place of another such folder only.
    return (folder / top).is_dir() and getattr(sys.modules.get(top), "__file__", None) is None


def _comes_from(name: str, module: types.ModuleType | None, folder: pathlib.Path) -> bool:
    if module is None or name.partition(".")[0] in ("__main__", "determined"):
        return False
    own = vars(module)  # not getattr: some modules, such as torch.classes, make up any attribute they are asked for
    places = [place for place in (own.get("__file__"), *(own.get("__path__") or ())) if place]
    # A virtual environment may lie within the folder, and its libraries cannot be imported twice.
    libraries = [library for library in installed_folders() if folder in library.parents]
    return any(_is_below(pathlib.Path(place).resolve(), folder, libraries) for place in places)


def _is_below(place: pathlib.Path, folder: pathlib.Path, libraries: list[pathlib.Path]) -> bool:
    return place.is_relative_to(folder) and not any(place.is_relative_to(library) for library in libraries)


def installed_folders() -> set[pathlib.Path]:
    """Return the folders of this Python and of its installed packages."""
    return {pathlib.Path(path).resolve() for path in (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())}


def _forget(names: set[str]) -> dict[str, types.ModuleType]:
    return {name: sys.modules.pop(name) for name in names}
