"""The import direction of the layers, read from the sources."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

SOURCES = pathlib.Path(__file__).parents[2] / "src" / "determined"

# Low to high. A module imports from lower rows and from its own package, never from others in its row.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            *("errors", "_version", "_text", "_secrets", "_parent", "_processes", "_slurm", "_gone", "_packages"),
            *("util", "horovod"),
        }
    ),
    frozenset({"_home", "_import", "keras", "searcher", "transformers"}),
    frozenset({"storage", "tracking", "tensorboard"}),
    frozenset({"_info"}),
    frozenset({"core"}),
    frozenset({"_trial_context"}),
    frozenset({"pytorch"}),
    frozenset({"launch"}),
    frozenset({"experiment"}),
    frozenset({"experimental", "web"}),
    frozenset({"cli", "common"}),
)
# The launcher reads the configs of experiments, whose runner starts trials with the launcher; inside functions only.
UPWARDS_WHEN_CALLED = {("launch", "experiment")}
HEIGHT = {part: height for height, parts in enumerate(LAYERS) for part in parts}
TORCH_FREE = ("core", "storage", "tracking", "tensorboard", "experiment/config")
HEAVY = ("tensorboard", "sqlalchemy", "typer", "rich", "matplotlib", "pydantic", "yaml")
TOP = "determined"


class Import(NamedTuple):
    """One imported module as the interpreter would name it, and where the source says so."""

    module: str
    file: pathlib.Path
    line: int

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCES.parent)}:{self.line} imports {self.module}"


def source_files() -> list[pathlib.Path]:
    return sorted(SOURCES.rglob("*.py"))


def part_of(file: pathlib.Path) -> str:
    """The package or module directly below `determined` that a file belongs to; '' for the top package."""
    first = file.relative_to(SOURCES).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def package_of(file: pathlib.Path) -> list[str]:
    return [TOP, *file.relative_to(SOURCES).parent.parts]


def is_module(dotted: str) -> bool:
    path = SOURCES.parent.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of(file: pathlib.Path) -> Iterator[Import]:
    """Every import anywhere in the file: at the top, inside functions, under TYPE_CHECKING."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for module in modules_named_by(node, package_of(file)):
            yield Import(module, file, getattr(node, "lineno", 0))


def modules_named_by(node: ast.AST, package: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = package[: len(package) - node.level + 1] if node.level else []
    source = ".".join([*base, *([node.module] if node.module else [])])
    named = [f"{source}.{alias.name}" for alias in node.names]
    # `from determined import core` names a module, `from determined.core import init` something inside one.
    return [name if source.startswith(TOP) and is_module(name) else source for name in named]


def own_imports(file: pathlib.Path) -> list[Import]:
    return [found for found in imports_of(file) if found.module.split(".")[0] == TOP]


def imported_part(found: Import) -> str:
    _, _, below = found.module.partition(".")
    return below.partition(".")[0]


def test_every_module_has_a_place_in_the_layers() -> None:
    parts = {part_of(file) for file in source_files()} - {""}
    assert parts <= HEIGHT.keys(), f"give {sorted(parts - HEIGHT.keys())} a row in LAYERS"


def test_imports_go_downwards_only() -> None:
    upwards = [
        str(found)
        for file in source_files()
        for found in own_imports(file)
        if (here := part_of(file)) and (there := imported_part(found)) not in ("", here)
        if HEIGHT[there] >= HEIGHT[here] and (here, there) not in UPWARDS_WHEN_CALLED
    ]
    assert not upwards, "\n".join(upwards)


def test_only_the_command_line_imports_the_top_package() -> None:
    from_top = [
        str(found)
        for file in source_files()
        for found in own_imports(file)
        if part_of(file) not in ("", "cli") and not imported_part(found)
    ]
    assert not from_top, "\n".join(from_top)


def imports_when_loaded(tree: ast.AST) -> Iterator[ast.AST]:
    """The imports that run when the module is loaded: outside functions and TYPE_CHECKING blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from imports_when_loaded(node)


def test_the_launcher_reaches_up_to_experiments_only_when_called() -> None:
    when_loaded = [
        f"{file.relative_to(SOURCES.parent)}:{getattr(node, 'lineno', 0)} imports {module}"
        for below, above in UPWARDS_WHEN_CALLED
        for file in sorted((SOURCES / below).rglob("*.py"))
        for node in imports_when_loaded(ast.parse(file.read_text(encoding="utf-8")))
        for module in modules_named_by(node, package_of(file))
        if f"{module}.".startswith(f"{TOP}.{above}.")
    ]
    assert not when_loaded, "\n".join(when_loaded)


@pytest.mark.parametrize("package", TORCH_FREE)
def test_package_loads_without_torch(package: str) -> None:
    loading_torch = [
        f"{file.relative_to(SOURCES.parent)}:{getattr(node, 'lineno', 0)}"
        for file in sorted((SOURCES / package).rglob("*.py"))
        for node in imports_when_loaded(ast.parse(file.read_text(encoding="utf-8")))
        for module in modules_named_by(node, package_of(file))
        if module.split(".")[0] == "torch"
    ]
    assert not loading_torch, f"import torch inside the functions that need it: {loading_torch}"


def test_importing_pytorch_leaves_heavy_libraries_alone() -> None:
    program = f"import sys, determined.pytorch; print(*(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
