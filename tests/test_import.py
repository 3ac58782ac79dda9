"""det.import_from_path: imports come first from a folder, and leave no trace."""

from __future__ import annotations

import importlib
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import determined as det

Make = Callable[[str, dict[str, str]], pathlib.Path]


@pytest.fixture(autouse=True)
def unchanged_imports() -> Iterator[None]:
    """Fail a test after which the interpreter imports otherwise than before."""
    modules, path, bytecode = dict(sys.modules), list(sys.path), sys.dont_write_bytecode
    yield
    gone = {name for name in modules if sys.modules.get(name) is not modules[name]}
    assert not gone
    assert not [name for name in sys.modules.keys() - modules.keys() if name.startswith("probe")]
    assert (sys.path, sys.dont_write_bytecode) == (path, bytecode)


@pytest.fixture
def make(tmp_path: pathlib.Path) -> Make:
    """Makes a folder with files of the given contents."""

    def folder(name: str, files: dict[str, str]) -> pathlib.Path:
        for file, content in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path / name

    return folder


def load(name: str) -> Any:
    return importlib.import_module(name)


def test_module_comes_from_the_folder(make: Make) -> None:
    with det.import_from_path(make("a", {"probe_x.py": "value = 1"})):
        assert load("probe_x").value == 1


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_module_is_forgotten_afterwards(kind: type, make: Make) -> None:
    with det.import_from_path(kind(make("a", {"probe_x.py": ""}))):
        load("probe_x")
    with pytest.raises(ModuleNotFoundError):
        load("probe_x")


def test_folder_goes_before_everything_else_on_the_path(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make("a", {"probe_x.py": "value = 1"}), make("b", {"probe_x.py": "value = 2"})
    monkeypatch.syspath_prepend(str(first))
    with det.import_from_path(second):
        assert load("probe_x").value == 2
    monkeypatch.undo()


def test_two_folders_may_have_modules_of_one_name(make: Make) -> None:
    values = []
    for name in ("a", "b", "a"):
        with det.import_from_path(make(name, {"probe_x.py": f"value = {name!r}"})):
            values.append(load("probe_x").value)
    assert values == ["a", "b", "a"]


def test_module_that_was_imported_before_comes_back(make: Make) -> None:
    with det.import_from_path(make("a", {"probe_x.py": "value = 1"})):
        before = load("probe_x")
        with det.import_from_path(make("b", {"probe_x.py": "value = 2"})):
            assert load("probe_x").value == 2
        assert load("probe_x") is before


def test_outer_folder_is_still_searched_within_an_inner_one(make: Make) -> None:
    with (
        det.import_from_path(make("a", {"probe_x.py": "value = 1", "probe_y.py": "value = 1"})),
        det.import_from_path(make("b", {"probe_x.py": "value = 2"})),
    ):
        assert (load("probe_x").value, load("probe_y").value) == (2, 1)


def test_packages_and_their_submodules(make: Make) -> None:
    files = {"probe_p/__init__.py": "from . import inner", "probe_p/inner.py": "value = 1"}
    with det.import_from_path(make("a", files)):
        assert load("probe_p.inner").value == 1


def test_packages_of_one_name_do_not_mix(make: Make) -> None:
    first = make("a", {"probe_p/__init__.py": "", "probe_p/one.py": "value = 1"})
    second = make("b", {"probe_p/__init__.py": "", "probe_p/two.py": "value = 2"})
    with det.import_from_path(first):
        load("probe_p.one")
        with det.import_from_path(second):
            assert load("probe_p.two").value == 2
            with pytest.raises(ModuleNotFoundError):
                load("probe_p.one")
        assert load("probe_p.one").value == 1


def test_packages_without_init(make: Make) -> None:
    values = []
    for name in ("a", "b"):
        with det.import_from_path(make(name, {"probe_p/inner.py": f"value = {name!r}"})):
            values.append(load("probe_p.inner").value)
    assert values == ["a", "b"]


def test_module_that_a_program_finds_by_its_own_path_entry_is_forgotten(make: Make) -> None:
    folder = make("a", {"lib/probe_y.py": "value = 3"})
    with det.import_from_path(folder):
        sys.path.append(str(folder / "lib"))
        try:
            assert load("probe_y").value == 3
        finally:
            sys.path.remove(str(folder / "lib"))
    assert "probe_y" not in sys.modules


def test_exception_in_the_block_goes_on_and_leaves_no_trace(make: Make) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        det.import_from_path(make("a", {"probe_x.py": "import probe_y\n1 / 0", "probe_y.py": ""})),
    ):
        load("probe_x")
    assert "probe_y" not in sys.modules


def test_objects_stay_usable(make: Make) -> None:
    with det.import_from_path(make("a", {"probe_x.py": "one = 1\nclass Thing:\n    def value(self): return one"})):
        thing = load("probe_x").Thing()
    assert thing.value() == 1


def test_forgotten_class_is_unknown_to_pickle(make: Make) -> None:
    with det.import_from_path(make("a", {"probe_x.py": "class Thing: pass"})):
        thing = load("probe_x").Thing()
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(thing)


def test_nothing_is_written_into_the_folder(make: Make) -> None:
    folder = make("a", {"probe_p/__init__.py": "", "probe_x.py": ""})
    before = sorted(folder.rglob("*"))
    with det.import_from_path(folder):
        load("probe_p")
        load("probe_x")
    assert sorted(folder.rglob("*")) == before


def test_program_may_remove_the_folder_from_the_path_by_itself(make: Make) -> None:
    folder = make("a", {"probe_x.py": ""})
    with det.import_from_path(folder):
        load("probe_x")
        sys.path.remove(str(folder))


def test_earlier_modules_below_the_folder_are_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("a", {"lib/probe_y.py": ""})
    monkeypatch.syspath_prepend(str(folder / "lib"))
    module = load("probe_y")
    with det.import_from_path(folder):
        pass
    try:
        assert sys.modules["probe_y"] is module
    finally:
        sys.modules.pop("probe_y", None)
        monkeypatch.undo()


def test_libraries_of_an_environment_within_the_folder_are_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("a", {".venv/lib/probe_y.py": "", "probe_x.py": "import probe_y"})
    monkeypatch.setattr(sys, "prefix", str(folder / ".venv"))
    monkeypatch.syspath_prepend(str(folder / ".venv" / "lib"))
    with det.import_from_path(folder):
        load("probe_x")
        library = load("probe_y")
    try:
        assert "probe_x" not in sys.modules
        assert sys.modules["probe_y"] is library
    finally:
        sys.modules.pop("probe_y", None)
        monkeypatch.undo()


def test_determined_itself_is_never_shadowed(make: Make) -> None:
    with det.import_from_path(make("a", {"determined/__init__.py": "broken = True"})):
        assert load("determined") is det


@pytest.mark.parametrize("kind", ["nothing", "file"])
def test_what_is_no_folder_is_refused(kind: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=kind), det.import_from_path(tmp_path / kind):
        pytest.fail("the block began")


def test_torch_may_be_imported_first_within_the_block(tmp_path: pathlib.Path) -> None:
    # Some of its modules claim files in the working folder, which is the folder here.
    program = (
        "import determined as det\n"
        "with det.import_from_path('.'):\n"
        "    import torch\n"
        "import torch as again\n"
        "assert again is torch and again.ops is torch.ops\n"
        "import sys; assert 'torch.ops' in sys.modules\n"
    )
    source = pathlib.Path(det.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(source), "PATH": "", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_packages_are_there_without_having_been_imported() -> None:
    program = "import determined as det; print(det.core.init.__name__, det.pytorch.Trainer.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["init", "Trainer"]
