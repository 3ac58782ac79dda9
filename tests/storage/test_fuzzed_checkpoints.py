"""Checkpoints with anything in their files: used or refused with `InvalidCheckpointException`, and nothing else."""

from __future__ import annotations

import contextlib
import io
import pathlib
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from determined import core, pytorch, storage
from determined.errors import InvalidCheckpointException
from saving import reseal, save
from trials import LineTrial

MOST_MEMORY = 300 << 10
"""Kilobytes by which reading a checkpoint of a few may let the process grow."""

fuzz = settings(max_examples=40, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("DET_PROGRESS", "0")
        yield save()


@contextlib.contextmanager
def changed(saved: pathlib.Path, name: str, contents: bytes) -> Iterator[pathlib.Path]:
    """Give the checkpoint with other contents of one file, of which its manifest knows."""
    path = saved / name
    before = {file: file.read_bytes() for file in (path, saved / storage.MANIFEST_FILE)}
    path.write_bytes(contents)
    reseal(saved)
    try:
        yield saved
    finally:
        for file, its in before.items():
            file.write_bytes(its)


@contextlib.contextmanager
def refused_or_not() -> Iterator[None]:
    """Allow the one exception, and little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(InvalidCheckpointException):
        yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY


@st.composite
def mutations(draw: st.DrawFn, contents: bytes) -> bytes:
    """Contents with some pieces cut out, copied elsewhere, or written over."""
    mutated = bytearray(contents)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(mutated)))
        end = min(len(mutated), begin + draw(st.sampled_from([0, 1, 2, 4, 8, 64, 4096])))
        kind = draw(st.sampled_from(["cut", "copy", "overwrite", "truncate"]))
        if kind == "cut":
            del mutated[begin:end]
        elif kind == "copy":
            to = draw(st.integers(0, len(mutated)))
            mutated[to:to] = mutated[begin:end]
        elif kind == "overwrite":
            mutated[begin:end] = draw(st.binary(min_size=end - begin, max_size=end - begin))
        else:
            del mutated[begin:]
    return bytes(mutated)


@fuzz
@given(st.data())
def test_state_of_any_bytes_is_used_or_refused(saved: pathlib.Path, data: st.DataObject) -> None:
    contents = data.draw(mutations((saved / "state_dict.pth").read_bytes()))
    with changed(saved, "state_dict.pth", contents), refused_or_not():
        pytorch.load_trial_from_checkpoint_path(saved, LineTrial)


@fuzz
@given(st.data())
def test_state_with_any_pickle_is_used_or_refused(saved: pathlib.Path, data: st.DataObject) -> None:
    """The pickle is a part of the archive that is not packed, so its bytes are there to be changed."""
    whole = (saved / "state_dict.pth").read_bytes()
    begin = whole.index(b"data.pkl") + 8
    end = begin + 2000
    contents = (
        whole[:begin] + data.draw(mutations(whole[begin:end]))[: end - begin].ljust(end - begin, b".") + whole[end:]
    )
    with changed(saved, "state_dict.pth", contents), refused_or_not():
        pytorch.load_trial_from_checkpoint_path(saved, LineTrial)


@fuzz
@given(st.data())
def test_description_of_any_bytes_is_used_or_refused(saved: pathlib.Path, data: st.DataObject) -> None:
    contents = data.draw(mutations((saved / "load_data.json").read_bytes()))
    with changed(saved, "load_data.json", contents), refused_or_not():
        pytorch.load_trial_from_checkpoint_path(saved, LineTrial)


@fuzz
@given(st.data())
def test_metadata_of_any_bytes_are_a_map_or_refused(saved: pathlib.Path, data: st.DataObject) -> None:
    contents = data.draw(mutations((saved / "metadata.json").read_bytes()) | st.binary(max_size=40))
    with (
        core.init(checkpoint_storage=saved.parent) as context,
        changed(saved, "metadata.json", contents),
        refused_or_not(),
    ):
        assert isinstance(context.checkpoint.get_metadata(saved.name), dict)


@fuzz
@given(st.data())
def test_manifest_of_any_bytes_is_refused(saved: pathlib.Path, data: st.DataObject) -> None:
    whole = (saved / storage.MANIFEST_FILE).read_bytes()
    contents = data.draw(mutations(whole).filter(lambda found: found != whole))
    (saved / storage.MANIFEST_FILE).write_bytes(contents)
    try:
        with pytest.raises(InvalidCheckpointException, match=storage.MANIFEST_FILE):
            pytorch.load_trial_from_checkpoint_path(saved, LineTrial)
    finally:
        (saved / storage.MANIFEST_FILE).write_bytes(whole)


# Well-formed, but not what fit() saves

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**70)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from([torch.zeros(0), torch.zeros(3, 2), torch.ones(1, dtype=torch.int64)]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=2),
    max_leaves=3,
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to everything in a nested state."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield (*place, key)
        if not isinstance(value, list) or key < 3:  # of a long list, the beginning
            yield from places(one, (*place, key))


@fuzz
@given(st.data())
def test_weights_of_any_structure_are_used_or_refused(saved: pathlib.Path, data: st.DataObject) -> None:
    state = torch.load(saved / "state_dict.pth", weights_only=True)
    weights = {"models_state_dict": state["models_state_dict"]}
    *way, last = data.draw(st.sampled_from(list(places(weights))))
    inner: Any = weights
    for key in way:
        inner = inner[key]
    inner[last] = data.draw(values)
    target = io.BytesIO()
    torch.save(state | weights, target)
    with changed(saved, "state_dict.pth", target.getvalue()), refused_or_not():
        pytorch.load_trial_from_checkpoint_path(saved, LineTrial)
