"""The imports and sizes of the sources. `python tests/contract/house.py` prints lines, files and private imports."""

from __future__ import annotations

import ast
import collections
import functools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

SOURCES = pathlib.Path(__file__).parents[2] / "src" / "determined"
TOP = "determined"


class Import(NamedTuple):
    """One imported module as the interpreter would name it, and where the source says so."""

    module: str
    file: pathlib.Path
    line: int

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCES.parent)}:{self.line} imports {self.module}"

    @property
    def importer(self) -> str:
        return part_of(self.file)

    @property
    def imported(self) -> str:
        """The package or module directly below `determined` that is imported; '' for the top package."""
        return self.module.partition(".")[2].partition(".")[0]

    @property
    def is_private(self) -> bool:
        """Whether this imports an underscored module of another package."""
        inside = self.module.split(".")[2:]
        return self.imported != self.importer and any(name.startswith("_") for name in inside)


def source_files() -> list[pathlib.Path]:
    return sorted(SOURCES.rglob("*.py"))


def part_of(file: pathlib.Path) -> str:
    """The package or module directly below `determined` that a file belongs to; '' for the top package."""
    first = file.relative_to(SOURCES).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@functools.cache
def imports_of(file: pathlib.Path, *, when_loaded: bool = False) -> list[Import]:
    """Every import in a file; with `when_loaded`, those outside functions and TYPE_CHECKING blocks."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    package = [TOP, *file.relative_to(SOURCES).parent.parts]
    return [
        Import(module, file, node.lineno)
        for node in _import_nodes(tree, when_loaded)
        for module in _modules_named_by(node, package)
    ]


def own_imports(file: pathlib.Path, *, when_loaded: bool = False) -> list[Import]:
    """The imports of modules of `determined`."""
    return [found for found in imports_of(file, when_loaded=when_loaded) if found.module.split(".")[0] == TOP]


def private_imports() -> list[Import]:
    """The imports of an underscored module of another package."""
    return [found for file in source_files() for found in own_imports(file) if found.is_private]


def _import_nodes(tree: ast.AST, when_loaded: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if when_loaded and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if when_loaded and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from _import_nodes(node, when_loaded)


def _modules_named_by(node: ast.Import | ast.ImportFrom, package: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = package[: len(package) - node.level + 1] if node.level else []
    source = ".".join([*base, *([node.module] if node.module else [])])
    named = [f"{source}.{alias.name}" for alias in node.names]
    # `from determined import core` names a module, `from determined.core import init` something inside one.
    return list(dict.fromkeys(name if source.startswith(TOP) and _is_module(name) else source for name in named))


def _is_module(dotted: str) -> bool:
    path = SOURCES.parent.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def main() -> None:
    lengths = {file.relative_to(SOURCES): file.read_bytes().count(b"\n") for file in source_files()}
    packages: collections.Counter[str] = collections.Counter()
    for file, length in lengths.items():
        packages[file.parts[0] if len(file.parts) > 1 else "(top)"] += length
    folders = collections.Counter(file.parent.as_posix() for file in lengths)
    private = private_imports()
    print(f"lines: {sum(packages.values())}")
    print("".join(f"  {count:6} {name}\n" for name, count in packages.most_common()), end="")
    print("fullest folders, in files:")
    print("".join(f"  {count:6} {name}\n" for name, count in folders.most_common(8)), end="")
    print(f"imports of another package's private modules: {len(private)}")
    print("".join(f"  {found}\n" for found in private), end="")
    print(f"lines of the loop: {lengths[pathlib.Path('pytorch/_loop/loop.py')]}")


if __name__ == "__main__":
    main()
