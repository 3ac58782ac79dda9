"""The import direction of the layers, read from the sources."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Sequence

import pytest
from house import SOURCES, imports_of, own_imports, part_of, private_imports, source_files

# Low to high. A module imports from lower rows and from its own package, never from others in its row.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            *("errors", "_version", "_text", "_secrets", "_processes", "_slurm", "_gone", "_packages"),
            *("_database_location", "util", "horovod"),
        }
    ),
    frozenset({"_home", "_import", "processes", "keras", "searcher", "transformers"}),
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
# The same inside `pytorch`, for what is imported when a module is loaded; modules of one row may import each other.
PYTORCH_LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"_loop.progress"}),
    frozenset({"_loop.plan"}),
    frozenset({"_callback", "samplers"}),
    frozenset({"_data"}),
    frozenset({"_metrics", "_optim", "_report"}),
    frozenset({"_backends"}),
    frozenset({"_experimental"}),
    frozenset({"_context"}),
    frozenset({"_trial"}),
    frozenset({"_accelerate", "_checkpoint"}),
    frozenset({"_loop"}),
    frozenset({"_trainer"}),
    frozenset({"__init__", "deepspeed", "experimental"}),
)
PYTORCH_HEIGHT = {part: height for height, parts in enumerate(PYTORCH_LAYERS) for part in parts}

# The private modules of other packages that a package still imports. Entries may only be removed.
PRIVATE_IMPORTS: dict[str, set[str]] = {}


def files_of(package: str) -> list[pathlib.Path]:
    return sorted((SOURCES / package).rglob("*.py"))


def test_every_module_has_a_place_in_the_layers() -> None:
    parts = {part_of(file) for file in source_files()} - {""}
    assert parts <= HEIGHT.keys(), f"give {sorted(parts - HEIGHT.keys())} a row in LAYERS"


def test_imports_go_downwards_only() -> None:
    upwards = [
        str(found)
        for file in source_files()
        for found in own_imports(file)
        if (here := found.importer) and (there := found.imported) not in ("", here)
        if HEIGHT[there] >= HEIGHT[here] and (here, there) not in UPWARDS_WHEN_CALLED
    ]
    assert not upwards, "\n".join(upwards)


def test_only_the_command_line_imports_the_top_package() -> None:
    from_top = [
        str(found)
        for file in source_files()
        for found in own_imports(file)
        if found.importer not in ("", "cli") and not found.imported
    ]
    assert not from_top, "\n".join(from_top)


def test_the_launcher_reaches_up_to_experiments_only_when_called() -> None:
    when_loaded = [
        str(found)
        for below, above in UPWARDS_WHEN_CALLED
        for file in files_of(below)
        for found in own_imports(file, when_loaded=True)
        if found.imported == above
    ]
    assert not when_loaded, "\n".join(when_loaded)


def pytorch_part(parts: Sequence[str]) -> str:
    """The name in PYTORCH_LAYERS of a module, given by its path below `determined.pytorch`."""
    two = ".".join(parts[:2])
    return two if two in PYTORCH_HEIGHT else parts[0]


def part_of_pytorch(file: pathlib.Path) -> str:
    return pytorch_part(file.relative_to(SOURCES / "pytorch").with_suffix("").parts)


def test_every_module_of_pytorch_has_a_place_in_its_layers() -> None:
    parts = {part_of_pytorch(file) for file in files_of("pytorch")}
    assert parts <= PYTORCH_HEIGHT.keys(), f"give {sorted(parts - PYTORCH_HEIGHT.keys())} a row in PYTORCH_LAYERS"


def test_imports_inside_pytorch_go_downwards_only() -> None:
    upwards = [
        f"{found}: {there} is above {here}"
        for file in files_of("pytorch")
        for found in own_imports(file, when_loaded=True)
        if found.imported == "pytorch"
        if (there := pytorch_part(found.module.split(".")[2:] or ["__init__"])) != (here := part_of_pytorch(file))
        if PYTORCH_HEIGHT[there] > PYTORCH_HEIGHT[here]
    ]
    assert not upwards, "\n".join(upwards)


def test_no_package_imports_a_private_module_of_another() -> None:
    new = [str(found) for found in private_imports() if found.module not in PRIVATE_IMPORTS.get(found.importer, ())]
    assert not new, "import what the package exports, or export it there:\n" + "\n".join(new)


def test_the_private_imports_that_are_gone_are_not_listed() -> None:
    left = {(found.importer, found.module) for found in private_imports()}
    gone = [(package, module) for package, modules in PRIVATE_IMPORTS.items() for module in sorted(modules)]
    gone = [entry for entry in gone if entry not in left]
    assert not gone, f"remove from PRIVATE_IMPORTS: {gone}"


@pytest.mark.parametrize("package", TORCH_FREE)
def test_package_loads_without_torch(package: str) -> None:
    loading_torch = [
        str(found)
        for file in files_of(package)
        for found in imports_of(file, when_loaded=True)
        if found.module.split(".")[0] == "torch"
    ]
    assert not loading_torch, "import torch inside the functions that need it:\n" + "\n".join(loading_torch)


def test_importing_pytorch_leaves_heavy_libraries_alone() -> None:
    program = f"import sys, determined.pytorch; print(*(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
