"""Import a program's modules from a folder without leaving traces in this process."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import sys
import types
from collections.abc import Iterator


@contextlib.contextmanager
def import_from_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make imports inside the block come first from the folder `path`.

    Modules imported from that folder are forgotten when the block ends, so two folders may hold different
    modules of the same name; objects taken from them stay usable.

        with det.import_from_path("checkpoint/code"):
            import model_def
    """
    folder = pathlib.Path(path).resolve()
    if not folder.is_dir():
        raise FileNotFoundError(f"import_from_path({str(path)!r}): there is no such folder to import from.")
    before = _forget({name for name in sys.modules if _is_shadowed(name, folder)})
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _forget({name for name, module in list(sys.modules.items()) if _comes_from(module, folder)})
        sys.modules.update(before)


def _is_shadowed(name: str, folder: pathlib.Path) -> bool:
    """Say whether the folder has its own top-level module of this (already imported) name."""
    top = name.partition(".")[0]
    if top in sys.builtin_module_names or top in ("__main__", "determined"):
        return False
    return (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()


def _comes_from(module: types.ModuleType | None, folder: pathlib.Path) -> bool:
    if module is None or module.__name__ == "__main__":
        return False
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(place and pathlib.Path(place).resolve().is_relative_to(folder) for place in places)


def _forget(names: set[str]) -> dict[str, types.ModuleType]:
    return {name: sys.modules.pop(name) for name in names}
