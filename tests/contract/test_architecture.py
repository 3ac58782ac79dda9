"""The maps of the code, `docs/architecture.md` and that of CONTRIBUTING, name only what exists."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ROOT / "src" / "determined"
PAGES = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]
PATH = re.compile(r"`((?:[\w.-]+/)*(?:[\w-]+\.py|[\w.-]+/))`")


def paths_of(page: pathlib.Path) -> set[str]:
    """The files and folders that a page names in backticks."""
    return set(PATH.findall(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_map_names_only_files_that_exist(page: pathlib.Path) -> None:
    missing = {path for path in paths_of(page) if not any((base / path).exists() for base in (SOURCES, ROOT))}
    assert not missing


def test_architecture_page_names_every_sub_package_of_pytorch() -> None:
    page = PAGES[0].read_text(encoding="utf-8")
    packages = {file.parent.name for file in (SOURCES / "pytorch").glob("*/__init__.py")}
    assert {name for name in packages if f"{name}/" not in page} == set()
