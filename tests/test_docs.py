"""What the README and the documentation show works: programs run, links lead somewhere, every name is described.

A code block with a title, such as ```python title="line.py", is a whole program. Further programs of a page may import
`line`, the program of the README.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import os
import pathlib
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import forking
from determined import pytorch
from trials import LineTrial, fit

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, *DOCS]
LINKING_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").rglob("*.md"))]

FENCED = re.compile(r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
DIRECTIVE = re.compile(r"^::: (?P<name>[\w.]+)$", re.M)


class Block(NamedTuple):
    """A block of Python code on a page; one with a title is a whole program."""

    page: pathlib.Path
    title: str | None
    code: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.title or self.code.strip().splitlines()[0]}"


def name_of(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: pathlib.Path) -> list[Block]:
    found = FENCED.finditer(page.read_text(encoding="utf-8"))
    return [Block(page, match["title"], match["code"]) for match in found if match["language"] == "python"]


BLOCKS = [block for page in PAGES for block in blocks(page)]
PROGRAMS = [block for block in BLOCKS if block.title]
FIRST_PROGRAM = next(block for block in PROGRAMS if block.page == README)


@pytest.fixture
def folder_with_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder to run programs in, from which they can import the program of the README."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "line.py").write_text(FIRST_PROGRAM.code, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))  # programs may start others, from here
    monkeypatch.delitem(sys.modules, "line", raising=False)
    yield folder
    sys.modules.pop("line", None)  # other tests have another module of this name


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.title != "line.py"], ids=str)
def test_program_runs(program: Block, folder_with_line: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder_with_line / str(program.title)
    path.write_text(program.code, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(path)])
    # In this process, since starting one for each would mostly import torch.
    runpy.run_path(str(path), run_name="__main__")


def test_program_of_the_readme_runs_and_continues_as_it_says(folder_with_line: pathlib.Path) -> None:
    def run(**variables: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error", **variables}
        return forking.run(["line.py"], env=environment, capture_output=True, check=True).stdout.splitlines()

    says = run()[-1]
    checkpoint = re.search(r"continue: DET_LATEST_CHECKPOINT=(\S+) .*line\.py$", says)
    assert checkpoint, says
    (folder_with_line / "line.py").write_text(FIRST_PROGRAM.code.replace("Epoch(3)", "Epoch(4)"), encoding="utf-8")
    assert "batch 80/80, epoch 4.0/4.0" in run(DET_LATEST_CHECKPOINT=checkpoint[1])[0]


def test_start_page_shows_the_program_of_the_readme() -> None:
    (shown,) = [block for block in PROGRAMS if block.page == ROOT / "docs" / "index.md"]
    assert shown.code == FIRST_PROGRAM.code


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_is_python(block: Block) -> None:
    ast.parse(textwrap.dedent(block.code))


@pytest.mark.parametrize("block", blocks(ROOT / "docs" / "tutorial.md")[:-1], ids=str)
def test_tutorial_quotes_the_example(block: Block) -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "examples" / "digits").glob("*.py")]
    assert any(block.code in source for source in sources)


def schedule_rows() -> list[tuple[int, str, int, list[int]]]:
    """Return (aggregation, step mode, frequency, steps after each batch) of the table in the guide to schedules."""
    rows, aggregation = [], 0
    for line in (ROOT / "docs" / "guides" / "schedules.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| \*\*aggregation (\d)\*\*", line):
            aggregation = int(match[1])
        elif match := re.match(r"\| `(STEP_\w+)`(?:, frequency (\d))? \|([ |\d]+)\|$", line):
            rows.append((aggregation, match[1], int(match[2] or 1), [int(cell) for cell in match[3].split("|")]))
    return rows


@pytest.mark.parametrize(("aggregation", "mode", "frequency", "steps"), schedule_rows())
def test_schedules_step_as_the_guide_says(aggregation: int, mode: str, frequency: int, steps: list[int]) -> None:
    class ScheduledTrial(LineTrial):
        samples, batch_size = 16, 4  # four batches an epoch

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.positions: list[int] = []
            self.scheduler = context.wrap_lr_scheduler(
                torch.optim.lr_scheduler.StepLR(self.optimizer, 1), pytorch.LRScheduler.StepMode[mode], frequency
            )

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.positions.append(self.scheduler.last_epoch)
            return super().train_batch(batch, epoch_idx, batch_idx)

    trial = fit(ScheduledTrial, {"aggregation_frequency": aggregation}, max_length=pytorch.Batch(len(steps)))
    positions = [*trial.positions, trial.scheduler.last_epoch]
    assert [after - before for before, after in itertools.pairwise(positions)] == steps


def test_guide_shows_when_schedules_step() -> None:
    assert len(schedule_rows()) == 12


@pytest.mark.parametrize("page", LINKING_PAGES, ids=name_of)
def test_relative_links_resolve(page: pathlib.Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for match in LINK.finditer(text):
        target, _, anchor = match["target"].partition("#")
        if ":" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{name_of(page)} links to {target}, which is not there"
        assert not anchor or anchor in anchors(file), f"{name_of(page)} links to {target}#{anchor}, which is not there"


def anchors(page: pathlib.Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def public_names(*modules: str) -> list[str]:
    return [f"{module}.{name}" for module in modules for name in importlib.import_module(module).__all__]


def value_of(qualified: str) -> Any:
    module, _, name = qualified.rpartition(".")
    return getattr(importlib.import_module(module), name)


def is_described(value: Any) -> bool:
    # Not inspect.getdoc: it would take the docstring of a base class.
    return bool((getattr(value, "__doc__", None) or "").strip())


DOCUMENTED = ("determined.pytorch", "determined.core", "determined.experimental.client")


@pytest.mark.parametrize("qualified", public_names(*DOCUMENTED))
def test_public_name_has_a_docstring(qualified: str) -> None:
    value = value_of(qualified)
    assert is_described(value)
    if inspect.isclass(value):
        methods = {name: member for name, member in vars(value).items() if not name.startswith("_")}
        bare = [name for name, member in methods.items() if callable(member) and not is_described(member)]
        assert not bare


PACKAGES = [
    "determined.pytorch",
    "determined.pytorch.samplers",
    "determined.core",
    "determined.experimental.client",
    "determined.tracking",
    "determined.tensorboard",
]


@pytest.mark.parametrize("qualified", public_names(*PACKAGES))
def test_public_name_is_in_the_reference(qualified: str) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md")]
    described = {match["name"] for page in pages for match in DIRECTIVE.finditer(page)}
    package, _, name = qualified.rpartition(".")
    listed = name.startswith("_") and any(f"| `{name}` |" in page for page in pages)
    assert listed or qualified in described or package in described


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The built documentation; a warning would fail the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.thorough
def test_documentation_builds_without_a_warning(site: pathlib.Path) -> None:
    assert (site / "guides" / "data" / "index.html").is_file()


@pytest.mark.thorough
def test_documentation_loads_nothing_from_elsewhere(site: pathlib.Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe)[^>]*\bsrc=\"?https?:|<link[^>]*rel=\"?stylesheet[^>]*https?:")
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(DOCS)
    assert [page.name for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []
