"""Snapshots of the folder that holds a program."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import determined
from determined import errors
from determined._home import home
from determined.experiment._code import LIMIT, take

GIT = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "program"
    path.mkdir()
    return path


@pytest.fixture
def destination(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "experiments" / "1" / "code"


def make(folder: pathlib.Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def tree(folder: pathlib.Path) -> set[str]:
    """Return what there is in a folder, folders with a slash at the end."""
    found = folder.rglob("*")
    return {path.relative_to(folder).as_posix() + "/" * (path.is_dir() and not path.is_symlink()) for path in found}


def test_everything_is_copied(folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "train.py", "a/b/c.txt", ".hidden")
    (folder / "empty").mkdir()
    take(folder, destination)
    assert tree(destination) == {"train.py", "a/", "a/b/", "a/b/c.txt", ".hidden", "empty/"}
    assert (destination / "a/b/c.txt").read_text() == "a/b/c.txt"


def test_later_changes_do_not_reach_the_snapshot(folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "train.py")
    take(folder, destination)
    (folder / "train.py").write_text("changed")
    assert (destination / "train.py").read_text() == "train.py"


@pytest.mark.parametrize(
    ("include", "words"), [("absent", "There is no file or folder"), ("other/train.py", "has a 'train.py' already")]
)
def test_what_cannot_be_included_is_named(
    folder: pathlib.Path, destination: pathlib.Path, include: str, words: str
) -> None:
    make(folder, "train.py")
    make(folder.parent, "other/train.py")
    with pytest.raises(errors.InvalidExperimentException, match=words):
        take(folder, destination, [folder.parent / include])
    assert not destination.exists()


def test_what_is_included_counts_for_the_size(folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "train.py")
    large = folder.parent / "large.bin"
    with large.open("wb") as file:
        file.truncate(LIMIT)
    with pytest.raises(errors.InvalidExperimentException, match=r"too large.*\n.*\n.*large\.bin"):
        take(folder, destination, [large])


def test_modes_of_the_owner_and_times_are_kept(folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "run.sh", "plain.txt")
    (folder / "run.sh").chmod(0o750)
    (folder / "plain.txt").chmod(0o440)
    os.utime(folder / "run.sh", (1000, 2000.5))
    take(folder, destination)
    assert [stat.S_IMODE((destination / name).stat().st_mode) for name in ("run.sh", "plain.txt")] == [0o700, 0o400]
    assert (destination / "run.sh").stat().st_mtime == 2000.5


def test_snapshot_is_for_its_owner(folder: pathlib.Path, destination: pathlib.Path) -> None:
    take(folder, destination)
    assert stat.S_IMODE(destination.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "name", [".git/config", "__pycache__/a.pyc", "pkg/__pycache__/a.pyc", ".venv/x", "node_modules/x", ".mypy_cache/x"]
)
def test_what_no_program_needs_is_left_out(name: str, folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "train.py", name)
    take(folder, destination)
    assert "train.py" in tree(destination)
    assert name not in tree(destination)


@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta/history"])
def test_environments_of_any_name_are_left_out(mark: str, folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "train.py", f"my-env/{mark}", "my-env/lib/x.py")
    take(folder, destination)
    assert tree(destination) == {"train.py"}


def test_ignore_file_can_take_a_default_back(folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "node_modules/x.js")
    (folder / ".detignore").write_text("!node_modules/\n")
    take(folder, destination)
    assert "node_modules/x.js" in tree(destination)


FILES = ["a", "b.txt", "c.log", "data/a", "data/b.txt", "data/deep/c.log", "data/deep/a", "src/data/a", "src/x y", "#h"]


@pytest.mark.parametrize(
    ("rules", "left_out"),
    [
        ("data", {"data/a", "data/b.txt", "data/deep/c.log", "data/deep/a", "src/data/a"}),
        ("/data", {"data/a", "data/b.txt", "data/deep/c.log", "data/deep/a"}),
        ("data/deep", {"data/deep/c.log", "data/deep/a"}),
        ("a/", set()),
        ("*.log\n!data/deep/c.log", {"c.log"}),
        ("data/*\n!data/a", {"data/b.txt", "data/deep/c.log", "data/deep/a"}),
        ("data/\n!data/a", {"data/a", "data/b.txt", "data/deep/c.log", "data/deep/a", "src/data/a"}),
        ("**/deep/**", {"data/deep/c.log", "data/deep/a"}),
        ("data/**/a", {"data/a", "data/deep/a"}),
        ("# comment\n\n\\#h\n", {"#h"}),
        ("src/x\\ y   \r\n", {"src/x y"}),
        ("[a-b]", {"a", "data/a", "data/deep/a", "src/data/a"}),
        ("[!a]*", {"b.txt", "c.log", "#h", *(name for name in FILES if "/" in name)}),
        ("\ufeff/a", {"a"}),
    ],
)
def test_rules_are_those_of_git(
    rules: str, left_out: set[str], folder: pathlib.Path, destination: pathlib.Path
) -> None:
    make(folder, *FILES)
    (folder / ".detignore").write_text(rules, encoding="utf-8")
    take(folder, destination)
    assert set(FILES) - tree(destination) == left_out


names = st.sampled_from(["a", "b", "ab", "a b", "a.py", "-", "]", "d", "[", "^", "\\"])
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
tokens = st.sampled_from(
    [
        "a",
        "b",
        "d",
        "*",
        "**",
        "?",
        "/",
        "/",
        ".py",
        "[ab]",
        "[!a]",
        "[^b]",
        "[a-c]",
        "[]-]",
        "[[:alpha:]]",
        "[!]a]",
        "[",
        "]",
        "\\",
        "\\*",
        "!",
        "#",
        " ",
        "-",
        "[z-a]",
        "[\\]]",
    ]
)
# Where ** follows a letter git does, against its manual, sometimes as if it stood alone.
rule_lines = (
    st.lists(tokens, min_size=1, max_size=5).map("".join).filter(lambda rule: not re.search(r"[^/!]\*\*", rule))
)


@pytest.mark.skipif(not shutil.which("git"), reason="compares with git, which is not installed")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.sets(paths, min_size=1, max_size=8), rules=st.lists(rule_lines, max_size=4))
@example(files={"a/b/d"}, rules=["*", "!*/", "!d"])
@example(files={"a/b", "a/d"}, rules=["a/**", "!a/b"])
@example(files={"a b"}, rules=["a\\ "])
def test_same_files_as_git_leaves(files: set[str], rules: list[str], repository: pathlib.Path) -> None:
    # In memory where there is such a place, as copies are else written to the disk each time.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as place:
        folder, destination = pathlib.Path(place, "program"), pathlib.Path(place, "copy")
        folder.mkdir()
        for name in sorted(files, key=len, reverse=True):  # a folder goes before a file of its name
            if not (folder / name).exists() and not any((folder / above).is_file() for above in _above(name)):
                make(folder, name)
        (folder / ".detignore").write_text("\n".join(rules))
        take(folder, destination)
        ours = {name for name in tree(destination) if not name.endswith("/")}
        assert ours == _left_by_git(folder, repository)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q", folder], check=True, env=GIT)
    return folder / ".git"


def _above(name: str) -> list[str]:
    return [str(parent) for parent in pathlib.PurePath(name).parents][:-1]


def _left_by_git(folder: pathlib.Path, repository: pathlib.Path) -> set[str]:
    words = ["git", f"--git-dir={repository}", f"--work-tree={folder}", "ls-files", "-z", "--others"]
    done = subprocess.run(
        [*words, "--exclude-from=.detignore"], cwd=folder, check=True, capture_output=True, text=True, env=GIT
    )
    return set(filter(None, done.stdout.split("\0")))


def test_excluded_folder_is_not_even_looked_into(folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "train.py", "data/x")
    os.mkfifo(folder / "data" / "pipe")
    (folder / ".detignore").write_text("data/")
    take(folder, destination)
    assert tree(destination) == {"train.py", ".detignore"}


def test_too_large_folder_is_refused_with_lines_to_write(folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "train.py", "data/raw/small.txt", "models/one [1]/a.bin", "models/one [1]/b.bin")
    os.truncate(folder / "data/raw/small.txt", LIMIT)
    for name in "ab":
        os.truncate(folder / "models" / "one [1]" / f"{name}.bin", 3 << 19)
    with pytest.raises(errors.InvalidExperimentException) as refused:
        take(folder, destination)
    said = str(refused.value)
    assert "98.0 MB, where 95.0 MB are allowed" in said
    lines = re.findall(r"^ +([\d.]+) MB  (.*)", said, re.MULTILINE)
    assert lines == [("95.0", "/data/raw/small.txt"), ("3.0", "/models/one [1]/".replace("[", "\\["))]
    assert not destination.exists()
    (folder / ".detignore").write_text("\n".join(line for _, line in lines))
    take(folder, destination)
    assert tree(destination) == {".detignore", "train.py", "data/", "data/raw/", "models/"}


def test_folder_of_exactly_the_limit_is_taken(folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "data")
    os.truncate(folder / "data", LIMIT)
    take(folder, destination)
    assert (destination / "data").stat().st_size == LIMIT


def test_links_within_the_folder_stay_links(folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "a/file", "b/other")
    (folder / "b" / "near").symlink_to("other")
    (folder / "b" / "far").symlink_to("../a/file")
    (folder / "b" / "absolute").symlink_to(folder / "a" / "file")
    (folder / "around").symlink_to(f"../{folder.name}/a")
    (folder / "up").symlink_to(".")
    take(folder, destination)
    assert {name: os.readlink(destination / name) for name in ("b/near", "b/far", "b/absolute", "around", "up")} == {
        "b/near": "other",
        "b/far": "../a/file",
        "b/absolute": "../a/file",
        "around": "a",
        "up": ".",
    }
    assert (destination / "around" / "file").read_text() == "a/file"


def test_links_to_elsewhere_are_followed(
    tmp_path: pathlib.Path, folder: pathlib.Path, destination: pathlib.Path
) -> None:
    make(tmp_path / "library", "x.py", "sub/y.py", "__pycache__/z.pyc")
    (tmp_path / "library" / "inner").symlink_to("x.py")
    (folder / "library").symlink_to(tmp_path / "library")
    (folder / "one.py").symlink_to("../library/x.py")
    take(folder, destination)
    assert tree(destination) == {
        "library/",
        "library/x.py",
        "library/sub/",
        "library/sub/y.py",
        "library/inner",
        "one.py",
    }
    assert not any(path.is_symlink() for path in destination.rglob("*"))
    assert (destination / "library" / "inner").read_text() == "x.py"


def test_links_to_elsewhere_count_for_the_limit(
    tmp_path: pathlib.Path, folder: pathlib.Path, destination: pathlib.Path
) -> None:
    make(tmp_path, "large/data")
    os.truncate(tmp_path / "large" / "data", LIMIT + 1)
    (folder / "data").symlink_to(tmp_path / "large")
    with pytest.raises(errors.InvalidExperimentException, match=r" 95\.0 MB  /data/data"):
        take(folder, destination)
    (folder / ".detignore").write_text("data")
    take(folder, destination)


def test_links_to_nothing_stay_as_they_are(folder: pathlib.Path, destination: pathlib.Path) -> None:
    (folder / ".#lock").symlink_to("someone@host.123")
    (folder / "itself").symlink_to("itself")
    take(folder, destination)
    assert {os.readlink(destination / name) for name in (".#lock", "itself")} == {"someone@host.123", "itself"}


@pytest.mark.parametrize("target", ["..", "/"])
def test_link_to_a_folder_above_is_refused(target: str, folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "train.py")
    (folder / "above").symlink_to(target)
    with pytest.raises(errors.InvalidExperimentException, match="above: it is a link to a folder that it is in"):
        take(folder, destination)


def test_links_that_lead_in_a_circle_are_refused(
    tmp_path: pathlib.Path, folder: pathlib.Path, destination: pathlib.Path
) -> None:
    make(tmp_path / "library", "x.py")
    make(folder, "sub/y.py")
    (folder / "sub" / "library").symlink_to(tmp_path / "library")
    (tmp_path / "library" / "back").symlink_to(folder / "sub")
    with pytest.raises(errors.InvalidExperimentException, match="sub/library/back/library: it is a link to a folder"):
        take(folder, destination)


def test_special_files_are_refused_all_at_once(folder: pathlib.Path, destination: pathlib.Path) -> None:
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as door:
        here = os.getcwd()
        os.chdir(folder)  # as the path of a socket has to be short
        try:
            door.bind("door")
        finally:
            os.chdir(here)
    with pytest.raises(errors.InvalidExperimentException) as refused:
        take(folder, destination)
    assert "2 thing(s)" in str(refused.value)
    assert "pipe: it is neither a file nor a folder" in str(refused.value)
    assert f"{folder}/.detignore, such as /door" in str(refused.value)


@pytest.fixture
def open_folder() -> Iterator[pathlib.Path]:
    """One that other users may look into."""
    with tempfile.TemporaryDirectory() as place:
        pathlib.Path(place).chmod(0o777)
        yield pathlib.Path(place)


def test_files_that_cannot_be_read_are_named(open_folder: pathlib.Path) -> None:
    make(open_folder, "program/secret.txt", "program/hidden/x")
    (open_folder / "program" / "secret.txt").chmod(0)
    (open_folder / "program" / "hidden").chmod(0)
    program = (
        "import os, pathlib\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "from determined.experiment._code import take\n"
        f"take({str(open_folder / 'program')!r}, pathlib.Path({str(open_folder / 'copy')!r}))\n"
    )
    sources = pathlib.Path(determined.__file__).parents[1]
    # Loaded before the process gives up its rights, since other users may not see where the sources are.
    loaded = "import determined.experiment._code\n" + program
    variables = {**os.environ, "PYTHONPATH": str(sources), "DET_HOME": str(open_folder / "home")}
    done = subprocess.run([sys.executable, "-c", loaded], env=variables, capture_output=True, text=True)
    assert "secret.txt: Permission denied" in done.stderr
    assert "hidden: Permission denied" in done.stderr
    assert not (open_folder / "copy").exists()


def test_folder_that_is_not_there_is_named(tmp_path: pathlib.Path, destination: pathlib.Path) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=r"no folder '.*gone'"):
        take(tmp_path / "gone", destination)


def test_home_folder_and_snapshot_within_the_program_are_left_out(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DET_HOME", str(folder / "records"))
    make(folder, "train.py", "records/tracking.db", "out/keep.txt")
    take(folder, home().code(1))
    assert tree(home().code(1)) == {"train.py", "out/", "out/keep.txt"}
    take(folder, folder / "out" / "copy")
    assert tree(folder / "out" / "copy") == {"train.py", "out/", "out/keep.txt"}


def test_snapshot_that_is_there_is_not_replaced(folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "train.py")
    take(folder, destination)
    with pytest.raises(OSError):
        take(folder, destination)
    assert tree(destination.parent) == {"code/", "code/train.py"}


def test_failure_leaves_nothing(
    tmp_path: pathlib.Path, folder: pathlib.Path, destination: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder, "a", "b")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(errors.InvalidExperimentException, match=r"program/a cannot be copied to .*: No space left"):
        take(folder, destination)
    assert list(destination.parent.iterdir()) == []


def test_configs_in_the_snapshot_have_no_values_of_environment_variables(
    folder: pathlib.Path, destination: pathlib.Path
) -> None:
    text = "name: DATA=1 # mine\nenvironment:\n  environment_variables:\n    cpu: [A=1, B=]\n    cuda: ['PIN=30 517']\n"
    (folder / "config.yml").write_text(text)
    (folder / "run.sh").write_text("PIN=30 517")
    take(folder, destination)
    masked = text.replace("[A=1", "[A=********").replace("PIN=30 517", "PIN=********")
    assert (destination / "config.yml").read_text() == masked
    assert (destination / "run.sh").read_text() == "PIN=30 517"


def test_config_whose_variables_cannot_be_masked_is_named(folder: pathlib.Path, destination: pathlib.Path) -> None:
    (folder / "config.yaml").write_text('environment: {environment_variables: ["PIN=30\\x35"]}')
    with pytest.raises(errors.InvalidExperimentException, match=r"config.yaml .*environment_variables.*\.detignore"):
        take(folder, destination)
    assert not destination.exists()


def test_folders_nested_too_deep_are_named(folder: pathlib.Path, destination: pathlib.Path) -> None:
    make(folder, "train.py")
    with contextlib.chdir(folder):
        for _ in range(1500):
            os.mkdir("deep")
            os.chdir("deep")
    with pytest.raises(errors.InvalidExperimentException, match="deep: its folders are nested more than 100 deep"):
        take(folder, destination)
    (folder / ".detignore").write_text("/deep\n")
    take(folder, destination)
    assert tree(destination) == {"train.py", ".detignore"}
    subprocess.run(["rm", "-r", folder], check=True)  # which pytest cannot
