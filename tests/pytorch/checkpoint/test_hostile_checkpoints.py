"""Checkpoints made to do harm: refused before anything of theirs runs, is written or fills the memory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from determined import core, pytorch
from determined.errors import InvalidCheckpointException
from determined.pytorch import Batch
from saving import change_file, change_state, program_in, reseal, state_in, train
from trials import LineTrial

load = pytorch.load_trial_from_checkpoint_path


class Touching:
    """Pickles to a call that leaves a file behind."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.path),)


class Evaluating(Touching):
    def __reduce__(self) -> Any:
        return eval, (f"__import__('pathlib').Path({str(self.path)!r}).touch()",)


class Building(Touching):
    """Pickles to an object whose state is set by code."""

    def __reduce__(self) -> Any:
        return Setting, (), {"path": str(self.path)}


class Setting:
    def __setstate__(self, state: dict[str, str]) -> None:
        pathlib.Path(state["path"]).touch()


def touching(path: pathlib.Path) -> str:
    """Return a module that leaves a file behind."""
    return f"import pathlib\npathlib.Path({str(path)!r}).touch()\n"


PAYLOADS = [Touching, Evaluating, Building]


@pytest.fixture
def canary(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path that harmful code would make a file of; there must be none in the end."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "code of the checkpoint ran"


@pytest.fixture
def folder(checkpoint: pathlib.Path) -> pathlib.Path:
    return checkpoint


def assert_refused(folder: pathlib.Path, match: str) -> None:
    """Check that neither training nor loading takes a checkpoint."""
    with pytest.raises(InvalidCheckpointException, match=match):
        train(latest_checkpoint=folder, max_length=Batch(2))
    with pytest.raises(InvalidCheckpointException, match=match):
        load(folder, LineTrial)


# Pickles


@pytest.mark.parametrize("payload", PAYLOADS)
def test_payloads_do_harm_where_they_are_trusted(payload: type[Touching], tmp_path: pathlib.Path) -> None:
    pickle.loads(pickle.dumps(payload(tmp_path / "harm")))
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("key", ["models_state_dict", "optimizers_state_dict", "rng_state", "loop", "callbacks", "new"])
def test_code_in_an_entry_of_the_state_does_not_run(
    payload: type[Touching], key: str, folder: pathlib.Path, canary: pathlib.Path
) -> None:
    change_state(folder, **{key: payload(canary)})
    assert_refused(folder, r"state_dict\.pth cannot be read")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_code_in_a_bare_pickle_does_not_run(
    payload: type[Touching], folder: pathlib.Path, canary: pathlib.Path
) -> None:
    change_file(folder / "state_dict.pth", pickle.dumps(payload(canary), protocol=2))
    assert_refused(folder, r"state_dict\.pth cannot be read")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_code_in_a_file_of_the_old_format_does_not_run(
    payload: type[Touching], folder: pathlib.Path, canary: pathlib.Path
) -> None:
    state = state_in(folder) | {"mine": payload(canary)}
    torch.save(state, folder / "state_dict.pth", _use_new_zipfile_serialization=False)
    reseal(folder)
    assert_refused(folder, r"state_dict\.pth cannot be read")


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("with_manifest", [True, False])
def test_code_in_the_progress_of_determined_does_not_run(
    payload: type[Touching], with_manifest: bool, folder: pathlib.Path, canary: pathlib.Path
) -> None:
    (folder / "trial_state.pkl").write_bytes(pickle.dumps({"batches_trained": payload(canary)}))
    reseal(folder)
    if not with_manifest:
        (folder / "manifest.json").unlink()
    assert_refused(folder, r"trial_state\.pkl")


@given(st.binary(max_size=40))
def test_any_progress_of_determined_is_refused_or_is_numbers(
    tmp_path_factory: pytest.TempPathFactory, contents: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"fuzzed-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    torch.save({"models_state_dict": []}, folder / "state_dict.pth")
    (folder / "load_data.json").write_text('{"trial_type": "PyTorchTrial"}')
    (folder / "trial_state.pkl").write_bytes(contents)
    with pytest.raises(InvalidCheckpointException):
        load(folder, LineTrial)


@pytest.mark.parametrize("value", [2**70, -1, float("inf"), float("nan"), None, [], "x" * 100])
def test_progress_of_determined_that_is_no_number_is_refused(value: Any, folder: pathlib.Path) -> None:
    names = ("batches_trained", "epochs_trained", "last_val", "last_ckpt")
    (folder / "trial_state.pkl").write_bytes(pickle.dumps(dict.fromkeys(names, value)))
    reseal(folder)
    with pytest.raises(InvalidCheckpointException):
        train(latest_checkpoint=folder)


# What tells of the trial


@pytest.mark.parametrize(
    "spec",
    [
        "harmful:Trial",
        "harmful.inner:Trial",
        "code.harmful:Trial",
        ".harmful:Trial",
        "../harmful:Trial",
        "/harmful:Trial",
        "harmful",
        "os:mknod",
        "builtins:eval",
        "importlib:import_module",
        "runpy:run_path",
        "determined.pytorch:PyTorchTrial",
        "trials:LineTrial.__init__.__globals__",
        "trials:os.system",
        ["trials:LineTrial"],
        {"trials": "LineTrial"},
    ],
)
def test_class_outside_of_the_checkpoint_is_not_imported(
    spec: Any, folder: pathlib.Path, canary: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path" / "harmful").mkdir(parents=True)
    (tmp_path / "path" / "harmful" / "__init__.py").write_text(touching(canary))
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    description = json.loads((folder / "load_data.json").read_text())
    change_file(folder / "load_data.json", json.dumps(description | {"trial_cls_spec": spec}))
    with pytest.raises(InvalidCheckpointException):
        load(folder)
    assert "harmful" not in sys.modules


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder that is loaded without checks, as one of Determined's: for descriptions of all kinds."""
    folder = tmp_path_factory.mktemp("bare")
    torch.save({"models_state_dict": [LineTrial.make_model(None).state_dict()]}, folder / "state_dict.pth")  # type: ignore[arg-type]
    names = ("batches_trained", "epochs_trained", "last_val", "last_ckpt")
    (folder / "trial_state.pkl").write_bytes(pickle.dumps(dict.fromkeys(names, 0)))
    return folder


@given(description=json_values | st.fixed_dictionaries(
    {"trial_type": st.just("PyTorchTrial")},
    optional=dict.fromkeys(("hparams", "experiment_config", "trial_cls_spec", "import_paths"), json_values),
))  # fmt: skip
def test_any_description_is_refused_or_harmless(bare: pathlib.Path, description: Any) -> None:
    (bare / "load_data.json").write_text(json.dumps(description))
    with contextlib.suppress(InvalidCheckpointException):
        assert isinstance(load(bare, LineTrial), LineTrial)
    with pytest.raises(InvalidCheckpointException):
        load(bare)


@pytest.mark.parametrize(
    "paths", [["../.."], ["/"], ["a\0"], ["\ud800"], ["x" * 9999], [], [3], "tests", {}], ids=range(9)
)
def test_code_is_not_imported_from_outside_of_the_checkpoint(
    paths: Any, folder: pathlib.Path, canary: pathlib.Path
) -> None:
    (folder.parent / "harmful.py").write_text(touching(canary))
    description = json.loads((folder / "load_data.json").read_text())
    change = {"trial_cls_spec": "harmful:Trial", "import_paths": paths}
    change_file(folder / "load_data.json", json.dumps(description | change))
    with pytest.raises(InvalidCheckpointException, match="trial_class=YourTrial"):
        load(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\ud800", "1" * 100_000], ids=range(4))
@pytest.mark.parametrize("name", ["load_data.json", "metadata.json"])
def test_text_made_to_exhaust_the_reader_is_refused(name: str, text: str, folder: pathlib.Path) -> None:
    change_file(folder / name, text.encode(errors="surrogatepass"))
    if name == "load_data.json":
        with pytest.raises(InvalidCheckpointException, match=name):
            load(folder, LineTrial)
    else:
        with core.init() as context, pytest.raises(InvalidCheckpointException, match=name):
            context.checkpoint.get_metadata(folder.name)


# Code


@pytest.fixture
def planted(folder: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkpoint whose code leaves a file behind wherever it is imported."""
    for name in ("trials", "sitecustomize", "torch", "json", "determined"):
        (program_in(folder) / f"{name}.py").write_text(touching(tmp_path / "canary"))
    reseal(folder)
    return folder


def test_planted_code_does_not_run_in_training(planted: pathlib.Path, canary: pathlib.Path) -> None:
    train(latest_checkpoint=planted, max_length=Batch(2))


def test_planted_code_does_not_run_for_a_class_that_is_given(planted: pathlib.Path, canary: pathlib.Path) -> None:
    load(planted, LineTrial)


def test_planted_code_does_not_run_by_looking_at_the_checkpoint(
    planted: pathlib.Path, canary: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with core.init() as context:
        context.checkpoint.get_metadata(planted.name)
        context.checkpoint.download(planted.name, tmp_path / "copy")
        with context.checkpoint.restore_path(planted.name):
            pass


def test_planted_code_runs_where_the_docs_say_so(planted: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidCheckpointException):
        load(planted)
    assert (tmp_path / "canary").exists()
    assert "RUNS that code" in str(load.__doc__)


# Paths


@pytest.mark.parametrize("name", ["state_dict.pth", "load_data.json", "manifest.json"])
def test_link_to_a_file_outside_is_refused(name: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.move(folder / name, tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert_refused(folder, name)


def test_link_to_code_outside_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path, canary: pathlib.Path) -> None:
    shutil.move(folder / "code", tmp_path / "code")
    (folder / "code").symlink_to(tmp_path / "code")
    with pytest.raises(InvalidCheckpointException, match="not a plain file of the checkpoint"):
        load(folder)


def test_link_in_the_store_is_no_checkpoint(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    outside = shutil.move(folder, tmp_path / "outside")
    folder.symlink_to(outside)
    with pytest.raises(InvalidCheckpointException, match="no checkpoint"):
        train(latest_checkpoint=folder.name)


IDS = ["../../x", "..", ".", "/etc", "a/b", "a\\b", "a\0b", "-rf", "~", "*", "x" * 200, "\ud800", "a.partial", "a\n"]


@pytest.mark.parametrize("checkpoint_id", IDS, ids=range(len(IDS)))
def test_id_that_is_a_path_leads_nowhere(checkpoint_id: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with core.init() as context:
        checkpoints = context.checkpoint
        for call in (checkpoints.get_metadata, checkpoints.delete, lambda id: checkpoints.download(id, tmp_path / "x")):
            with pytest.raises(InvalidCheckpointException, match="is not a checkpoint id"):
                call(checkpoint_id)
    assert [path for path in before if not pathlib.Path(path).exists() and "/checkpoints/" in path] == []
    assert not (tmp_path / "x").exists()


# Sizes


def repacked(path: pathlib.Path, change: Callable[[zipfile.ZipFile, str, bytes], None]) -> bytes:
    """Return the archive at a path with each entry written by a function."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            change(new, name, old.read(name))
    return out.getvalue()


def test_bomb_is_refused_before_it_unpacks(folder: pathlib.Path) -> None:
    def packed(archive: zipfile.ZipFile, name: str, contents: bytes) -> None:
        info = zipfile.ZipInfo(name)
        info.compress_type = zipfile.ZIP_DEFLATED
        with archive.open(info, "w", force_zip64=True) as entry:
            entry.write(contents)
            if name.endswith("/data/0"):
                for _ in range(256):
                    entry.write(bytes(1 << 20))

    bomb = repacked(folder / "state_dict.pth", packed)
    assert len(bomb) < 1 << 20
    change_file(folder / "state_dict.pth", bomb)
    assert_refused(folder, r"state_dict\.pth cannot be read: it would unpack to \d{9} bytes")


def test_archive_that_is_packed_a_little_is_refused_too(folder: pathlib.Path) -> None:
    def packed(archive: zipfile.ZipFile, name: str, contents: bytes) -> None:
        archive.writestr(name, contents + bytes(10_000), zipfile.ZIP_DEFLATED)

    change_file(folder / "state_dict.pth", repacked(folder / "state_dict.pth", packed))
    assert_refused(folder, "would unpack to")


def test_entries_that_share_their_bytes_are_refused(folder: pathlib.Path) -> None:
    """Entries of the directory that all name the same large place in the file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data/0", bytes(1 << 16))
        first = archive.infolist()[0]
        for number in range(1, 50):
            twin = zipfile.ZipInfo(f"archive/data/{number}")
            twin.file_size, twin.compress_size, twin.CRC = first.file_size, first.compress_size, first.CRC
            twin.header_offset = first.header_offset
            archive.filelist.append(twin)
    change_file(folder / "state_dict.pth", out.getvalue())
    assert_refused(folder, "would unpack to")


def test_archive_that_is_not_packed_loads(folder: pathlib.Path) -> None:
    change_state(folder, callbacks={})
    assert isinstance(load(folder, LineTrial), LineTrial)


def test_tensor_of_impossible_size_is_refused(folder: pathlib.Path) -> None:
    class Huge:
        def __reduce__(self) -> Any:
            return bytearray, (1 << 60,)

    change_state(folder, callbacks=Huge())
    assert_refused(folder, r"state_dict\.pth cannot be read")
