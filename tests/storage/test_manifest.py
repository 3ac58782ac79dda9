"""The manifest of a checkpoint: whatever happened to a file is found, and nothing in it leads out of the folder."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from determined.errors import InvalidCheckpointException
from determined.storage import MANIFEST_FILE, Manifest

ORIGIN = {"database": "/home/me/tracking.db", "experiment_id": 3, "trial_id": 4}


def fill(folder: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    """Write files and their manifest into a folder."""
    for name, contents in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(contents)
    Manifest.of(folder, ORIGIN).write(folder)
    return folder


@contextmanager
def filled(files: dict[str, bytes]) -> Iterator[pathlib.Path]:
    """Give a folder with files and their manifest; for tests that need many."""
    with tempfile.TemporaryDirectory() as folder:
        yield fill(pathlib.Path(folder), files)


def verify(folder: pathlib.Path) -> None:
    Manifest.read(folder).verify(folder)


def assert_refused(folder: pathlib.Path, *words: str) -> None:
    with pytest.raises(InvalidCheckpointException) as caught:
        verify(folder)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def seal(contents: dict[str, Any]) -> bytes:
    """Return a manifest as a forger would make it, with the checksum that its contents need."""
    return json.dumps({**contents, "crc32": zlib.crc32(json.dumps(contents).encode())}, indent=1).encode()


def forge(folder: pathlib.Path, files: Any, **changes: Any) -> pathlib.Path:
    (folder / MANIFEST_FILE).write_bytes(seal({"format": 1, "origin": {}, "files": files, **changes}))
    return folder


def entry_of(contents: bytes) -> dict[str, int]:
    return {"size": len(contents), "crc32": zlib.crc32(contents)}


# What is intact

part = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=20)
names = st.lists(part.filter(lambda text: text not in (".", "..")), min_size=1, max_size=3).map("/".join)


@st.composite
def folders(draw: st.DrawFn, min_files: int = 0) -> dict[str, bytes]:
    """Files by their path; no path is that of another one's folder."""
    files = draw(st.dictionaries(names, st.binary(max_size=300), min_size=min_files, max_size=4))
    assume(not any(one != other and f"{other}/".startswith(f"{one}/") for one in files for other in files))
    assume(MANIFEST_FILE not in {name.partition("/")[0] for name in files})
    return files


@given(folders())
@example({"with\\backslash": b"1", "line\nbreak": b"2", " ": b"3", "é": b"4", "a/b/c": b"", "-": b"\0"})
def test_manifest_of_any_folder_verifies(files: dict[str, bytes]) -> None:
    with filled(files) as folder:
        verify(folder)
        assert set(Manifest.read(folder).files) == set(files)


def test_name_that_is_no_text_verifies(tmp_path: pathlib.Path) -> None:
    verify(fill(tmp_path, {os.fsdecode(b"caf\xe9"): b"latin"}))


def test_origin_is_kept(tmp_path: pathlib.Path) -> None:
    assert Manifest.read(fill(tmp_path, {"a": b"1"})).origin == ORIGIN


def test_extra_files_are_tolerated(tmp_path: pathlib.Path) -> None:
    folder = fill(tmp_path, {"a": b"1"})
    (folder / "notes.txt").write_text("mine")
    verify(folder)


def test_folder_may_be_reached_by_a_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real").mkdir()
    fill(tmp_path / "real", {"sub/a": b"1"})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    verify(tmp_path / "link")


def test_subfolder_can_be_left_out(tmp_path: pathlib.Path) -> None:
    folder = fill(tmp_path, {"a": b"1", "code/b": b"2", "code.py": b"3"})
    (folder / "code" / "b").unlink()
    Manifest.read(folder).verify(folder, except_below="code")
    (folder / "code.py").unlink()
    with pytest.raises(InvalidCheckpointException, match=r"code\.py is missing"):
        Manifest.read(folder).verify(folder, except_below="code")


# What is damaged


@given(folders(min_files=1), st.data())
def test_file_cut_off_anywhere_is_found(files: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*files, MANIFEST_FILE]))
    with filled(files) as folder:
        whole = (folder / name).read_bytes()
        assume(whole)
        (folder / name).write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        assert_refused(folder, str(folder / name))


@given(folders(min_files=1), st.data())
def test_any_flipped_bit_is_found(files: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*files, MANIFEST_FILE]))
    with filled(files) as folder:
        contents = bytearray((folder / name).read_bytes())
        assume(contents)
        contents[data.draw(st.integers(0, len(contents) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        (folder / name).write_bytes(contents)
        assert_refused(folder, str(folder / name))


def test_every_bit_of_a_manifest_counts(tmp_path: pathlib.Path) -> None:
    folder = fill(tmp_path, {"a": b"1", "sub/b": b"22"})
    whole = (folder / MANIFEST_FILE).read_bytes()
    for position in range(len(whole) * 8):
        changed = bytearray(whole)
        changed[position // 8] ^= 1 << position % 8
        (folder / MANIFEST_FILE).write_bytes(changed)
        assert_refused(folder, MANIFEST_FILE)


@given(folders(min_files=1), st.data())
def test_deleted_file_is_found(files: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(files)))
    with filled(files) as folder:
        (folder / name).unlink()
        assert_refused(folder, str(folder / name), "missing")


@given(folders(min_files=1), st.data())
def test_file_of_zeros_is_found(files: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*files, MANIFEST_FILE]))
    with filled(files) as folder:
        zeros = bytes((folder / name).stat().st_size)
        assume((folder / name).read_bytes() != zeros)
        (folder / name).write_bytes(zeros)
        assert_refused(folder, str(folder / name))


@given(folders(min_files=1), st.binary(min_size=1, max_size=20), st.data())
def test_grown_file_is_found(files: dict[str, bytes], more: bytes, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*files, MANIFEST_FILE]))
    with filled(files) as folder, (folder / name).open("ab") as file:
        file.write(more)
        file.flush()
        assert_refused(folder, str(folder / name))


@given(st.binary(min_size=1, max_size=50), st.data())
def test_files_of_equal_size_that_were_swapped_are_found(contents: bytes, data: st.DataObject) -> None:
    other = data.draw(st.binary(min_size=len(contents), max_size=len(contents)).filter(lambda found: found != contents))
    with filled({"a": contents, "b": other}) as folder:
        (folder / "a").rename(folder / "c")
        (folder / "b").rename(folder / "a")
        (folder / "c").rename(folder / "b")
        assert_refused(folder, str(folder / "a"))


def test_missing_manifest_is_found(tmp_path: pathlib.Path) -> None:
    assert_refused(tmp_path, str(tmp_path), f"no {MANIFEST_FILE}")


def test_newer_format_is_refused_with_the_remedy(tmp_path: pathlib.Path) -> None:
    assert_refused(forge(tmp_path, {}, format=2), MANIFEST_FILE, "format 2 is newer than 1", "upgrade Resolute")


def test_newer_format_may_look_otherwise(tmp_path: pathlib.Path) -> None:
    (tmp_path / MANIFEST_FILE).write_text('{"format": 7, "trees": []}')
    assert_refused(tmp_path, "upgrade Resolute")


# What is hostile

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_any_json_instead_of_a_manifest_is_refused(value: Any) -> None:
    with filled({}) as folder:
        (folder / MANIFEST_FILE).write_text(json.dumps(value))
        assert_refused(folder, MANIFEST_FILE)


@given(st.binary(max_size=60))
@example(b"\xff\xfe{\x00}\x00")
@example(b'{"format": 1, "origin": {"\xff": 1}, "files": {}}')
def test_any_bytes_instead_of_a_manifest_are_refused(contents: bytes) -> None:
    with filled({}) as folder:
        (folder / MANIFEST_FILE).write_bytes(contents)
        assert_refused(folder, MANIFEST_FILE)


@given(json_values, st.sampled_from(["format", "origin", "files", "entry", "size", "crc32"]))
def test_any_other_value_in_a_forged_manifest_is_refused(value: Any, place: str) -> None:
    entry = entry_of(b"1")
    original: Any = {"format": 1, "origin": {}, "files": {"a": entry}, "entry": entry, **entry}[place]
    assume(type(value) is not type(original) if place in ("origin", "files") else value != original)
    entry = {**entry, place: value} if place in entry else entry
    files = {"a": value if place == "entry" else entry}
    changes = {place: value} if place in ("format", "origin", "files") else {}
    with filled({"a": b"1"}) as folder:
        assert_refused(forge(folder, **({"files": files} | changes)))


OUTSIDE_NAMES = [
    "../outside",
    "sub/../../outside",
    "..",
    ".",
    "",
    "./a",
    "a/",
    "sub//a",
    "sub/./a",
    "sub/../a",
    "{outside}",
    "/{outside}",
    "..\\outside",
    "a\0",
    "\ud800",
    "~/outside",
    "a" * 300,
    "/".join("a" * 3000),
]


@pytest.mark.parametrize("name", OUTSIDE_NAMES, ids=range(len(OUTSIDE_NAMES)))
def test_name_that_is_no_file_of_the_checkpoint_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "outside").write_bytes(b"1")
    folder = tmp_path / "checkpoint"
    fill(folder, {"a": b"1", "sub/a": b"1"})
    assert_refused(forge(folder, {name.format(outside=tmp_path / "outside"): entry_of(b"1")}))
    assert (tmp_path / "outside").read_bytes() == b"1"


@given(st.text(max_size=30))
@example("../../../../../../etc/passwd")
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    with filled({}) as folder:
        forge(folder, {name: {"size": 1, "crc32": 0}})
        try:
            found = Manifest.read(folder).files
        except InvalidCheckpointException:
            return
        assert all((folder / one).resolve().is_relative_to(folder.resolve()) for one in found)


def link_to_a_file(folder: pathlib.Path, outside: pathlib.Path) -> str:
    (folder / "a").symlink_to(outside / "secret")
    return "a"


def link_to_a_folder(folder: pathlib.Path, outside: pathlib.Path) -> str:
    (folder / "sub").symlink_to(outside)
    return "sub/secret"


def link_to_itself(folder: pathlib.Path, outside: pathlib.Path) -> str:
    (folder / "sub").symlink_to(folder / "sub")
    return "sub/secret"


def pipe(folder: pathlib.Path, outside: pathlib.Path) -> str:
    os.mkfifo(folder / "a")
    return "a"


def folder_for_a_file(folder: pathlib.Path, outside: pathlib.Path) -> str:
    (folder / "a").mkdir()
    return "a"


def file_for_a_folder(folder: pathlib.Path, outside: pathlib.Path) -> str:
    (folder / "a").touch()
    return "a/secret"


@pytest.mark.parametrize(
    "plant", [link_to_a_file, link_to_a_folder, link_to_itself, pipe, folder_for_a_file, file_for_a_folder]
)
def test_what_is_no_plain_file_of_the_checkpoint_is_refused(
    plant: Callable[[pathlib.Path, pathlib.Path], str], tmp_path: pathlib.Path
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "checkpoint"
    outside.mkdir()
    folder.mkdir()
    (outside / "secret").write_bytes(b"1")
    name = plant(folder, outside)
    assert_refused(forge(folder, {name: entry_of(b"1")}), str(folder / name))


def test_link_instead_of_the_manifest_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    fill(tmp_path, {})
    (tmp_path / "checkpoint" / MANIFEST_FILE).symlink_to(tmp_path / MANIFEST_FILE)
    assert_refused(tmp_path / "checkpoint", MANIFEST_FILE)


def test_pipe_instead_of_the_manifest_is_refused(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / MANIFEST_FILE)
    assert_refused(tmp_path, MANIFEST_FILE)


def test_links_are_not_taken_into_a_manifest(tmp_path: pathlib.Path) -> None:
    (tmp_path / "secret").write_bytes(b"1")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    link_to_a_file(folder, tmp_path)
    link_to_a_folder(folder, tmp_path)
    assert Manifest.of(folder, {}).files == {}


@pytest.mark.parametrize("size", [2**62, 2**63, 10**400, 1e400, -1, True, "1", None, 1.0])
def test_size_that_the_file_has_not_is_refused(size: Any, tmp_path: pathlib.Path) -> None:
    fill(tmp_path, {"a": b"1"})
    assert_refused(forge(tmp_path, {"a": {**entry_of(b"1"), "size": size}}))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1_000_000,
        '{"a":' * 1_000_000,
        '{"format": ' + "1" * 100_000 + "}",
        '{"format": 1, "origin": ' + "[" * 5000 + "]" * 5000 + ', "files": {}}',
        '{"format": 1e400, "origin": {}, "files": {}}',
    ],
    ids=["lists", "maps", "number", "nested origin", "infinite"],
)
def test_text_made_to_exhaust_the_reader_is_refused(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / MANIFEST_FILE).write_text(text)
    assert_refused(tmp_path, MANIFEST_FILE)


def test_manifest_of_gigabytes_is_refused_unread(tmp_path: pathlib.Path) -> None:
    with (tmp_path / MANIFEST_FILE).open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take hours
    assert_refused(tmp_path, MANIFEST_FILE, "larger than any manifest")


def test_file_named_twice_is_refused(tmp_path: pathlib.Path) -> None:
    folder = fill(tmp_path, {"a": b"1"})
    text = (folder / MANIFEST_FILE).read_text()
    twice = text.replace('"files": {', '"files": {"a": {"size": 9, "crc32": 9},', 1)
    assert json.loads(twice) == json.loads(text)
    (folder / MANIFEST_FILE).write_text(twice)
    assert_refused(folder, MANIFEST_FILE)
