from __future__ import annotations

import concurrent.futures
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from determined.tensorboard import EventFile

Read = Callable[[pathlib.Path], list[Any]]
Point = tuple[int, float, float]

POINTS = st.tuples(st.integers(0, 2**63 - 1), st.floats(), st.floats())
CLOSE_TO_LONGER_STEPS = st.sampled_from([2 ** (7 * k) + d for k in range(1, 9) for d in (-1, 0, 1)])
NEAR_POINTS = st.tuples(CLOSE_TO_LONGER_STEPS, st.floats(width=32), st.floats())


def write(file: EventFile, name: str, points: Sequence[Point]) -> None:
    steps, values, wall_times = zip(*points, strict=True) if points else ((), (), ())
    file.add_scalars(name, steps, values, wall_times)


def as_float32(value: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(value))


def frames(data: bytes) -> Iterator[tuple[bytes, int, bytes, int]]:
    """Takes an event file apart: length bytes, their checksum, payload, its checksum."""
    while data:
        size, length_crc = struct.unpack("<QI", data[:12])
        payload, (payload_crc,) = data[12 : 12 + size], struct.unpack("<I", data[12 + size : 16 + size])
        yield data[:8], length_crc, payload, payload_crc
        data = data[16 + size :]


def masked_crc(data: bytes) -> int:
    """The definition, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def run_python(program: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "error", "-c", program, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@given(name=st.text(), points=st.lists(POINTS, max_size=300) | st.lists(NEAR_POINTS, max_size=300))
def test_a_window_reads_back_exactly(read_events: Read, name: str, points: list[Point]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = EventFile(pathlib.Path(folder))
        file.add_event_bytes(b"")
        write(file, name, points)
        file.close()
        _, *events = read_events(pathlib.Path(folder))
    assert [event.step for event in events] == [step for step, _, _ in points]
    assert all(len(event.summary.value) == 1 for event in events)
    assert {event.summary.value[0].tag for event in events} == ({name} if points else set())
    read = [(event.summary.value[0].simple_value, event.wall_time) for event in events]
    written = [(as_float32(value), wall_time) for _, value, wall_time in points]
    np.testing.assert_array_equal(read, written)


@pytest.mark.parametrize("length", [1, 127, 128, 300])
def test_long_windows_across_a_longer_step_read_back(tmp_path: pathlib.Path, length: int) -> None:
    steps = np.arange(16_300, 16_300 + length)
    file = EventFile(tmp_path)
    file.add_scalars("loss", steps, steps / 7, steps * 0.5)
    file.close()
    scalars = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload().Scalars("loss")
    assert [scalar.step for scalar in scalars] == steps.tolist()
    assert [scalar.value for scalar in scalars] == (steps / 7).astype(np.float32).tolist()
    assert [scalar.wall_time for scalar in scalars] == (steps * 0.5).tolist()


@given(name=st.text(max_size=400), points=st.lists(POINTS, max_size=5), payload=st.binary(max_size=700))
def test_checksums_follow_the_definition(name: str, points: list[Point], payload: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = EventFile(pathlib.Path(folder))
        write(file, name, points)
        file.add_event_bytes(payload)
        file.close()
        (path,) = pathlib.Path(folder).iterdir()
        data = path.read_bytes()
    for length, length_crc, content, content_crc in frames(data):
        assert (length_crc, content_crc) == (masked_crc(length), masked_crc(content))


def test_the_checksum_of_a_payload_of_megabytes_follows_the_definition(tmp_path: pathlib.Path) -> None:
    payload = np.random.default_rng(0).bytes((1 << 20) + 300)
    file = EventFile(tmp_path)
    file.add_event_bytes(payload)
    file.close()
    (path,) = tmp_path.iterdir()
    _, (_, _, content, crc) = frames(path.read_bytes())
    assert (content, crc) == (payload, masked_crc(payload))


def test_windows_of_several_metrics_share_one_file_in_order(tmp_path: pathlib.Path, read_events: Read) -> None:
    file = EventFile(tmp_path)
    for name in ("loss", "accuracy", "loss"):
        file.add_scalars(name, [0, 1], [0.5, 0.25], [1.0, 2.0])
    file.flush()
    names = [event.summary.value[0].tag for event in read_events(tmp_path)]
    assert names == ["loss", "loss", "accuracy", "accuracy", "loss", "loss"]


def test_nothing_is_opened_before_the_first_write(tmp_path: pathlib.Path) -> None:
    file = EventFile(tmp_path / "deep" / "folder")
    file.add_scalars("loss", [], [], [])
    file.flush()
    file.close()
    assert not (tmp_path / "deep").exists()


def test_the_first_write_makes_the_folder(tmp_path: pathlib.Path, read_events: Read) -> None:
    file = EventFile(tmp_path / "deep" / "folder")
    file.add_scalars("loss", [3], [0.5], [1.0])
    file.flush()
    assert [event.step for event in read_events(tmp_path / "deep" / "folder")] == [3]


def test_a_write_after_close_opens_a_new_file_that_sorts_later(tmp_path: pathlib.Path) -> None:
    file = EventFile(tmp_path)
    for step in range(12):
        file.add_scalars("loss", [step], [0.5], [1.0])
        file.close()
    assert len(list(tmp_path.iterdir())) == 12
    scalars = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [scalar.step for scalar in scalars] == list(range(12))


def test_files_opened_within_one_second_in_one_folder_both_survive(tmp_path: pathlib.Path) -> None:
    files = [EventFile(tmp_path) for _ in range(2)]
    for step, file in enumerate(files):
        file.add_scalars("loss", [step], [0.5], [1.0])
    for file in files:
        file.close()
    scalars = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [scalar.step for scalar in scalars] == [0, 1]


def test_an_existing_file_of_the_same_name_is_left_alone(tmp_path: pathlib.Path) -> None:
    program = """
import os, pathlib, sys, time
time.time = lambda: 1e9
os.getpid = lambda: 1
from determined.tensorboard import EventFile
file = EventFile(pathlib.Path(sys.argv[1]))
file.add_scalars("loss", [int(sys.argv[2])], [0.5], [1.0])
file.close()
"""
    for step in range(3):
        run_python(program, tmp_path, step)
    scalars = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [scalar.step for scalar in scalars] == [0, 1, 2]


def test_threads_that_write_at_once_lose_and_mix_nothing(tmp_path: pathlib.Path, read_events: Read) -> None:
    file = EventFile(tmp_path)

    def write_windows(name: str) -> None:
        for start in range(0, 1000, 50):
            steps = np.arange(start, start + 50)
            file.add_scalars(name, steps, steps, steps)
            file.flush()

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(write_windows, "abcd"))
    steps: dict[str, list[int]] = {}
    for event in read_events(tmp_path):
        steps.setdefault(event.summary.value[0].tag, []).append(event.step)
    assert steps == {name: list(range(1000)) for name in "abcd"}


def test_a_write_long_after_the_last_reaches_the_file_by_itself(
    tmp_path: pathlib.Path, read_events: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = EventFile(tmp_path)
    file.add_scalars("loss", [0], [0.5], [1.0])
    later = time.monotonic() + 60
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: later)
        file.add_scalars("loss", [1], [0.5], [1.0])
    assert [event.step for event in read_events(tmp_path)] == [0, 1]


def test_a_file_nobody_closed_is_complete_when_the_program_ends(tmp_path: pathlib.Path, read_events: Read) -> None:
    program = """
import pathlib, sys
from determined.tensorboard import EventFile
file = EventFile(pathlib.Path(sys.argv[1]))
file.add_scalars("loss", [7], [0.5], [1.0])
"""
    run_python(program, tmp_path)
    assert [event.step for event in read_events(tmp_path)] == [7]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_a_file_of_its_own(tmp_path: pathlib.Path) -> None:
    program = """
import os, pathlib, sys
from determined.tensorboard import EventFile
file = EventFile(pathlib.Path(sys.argv[1]))
file.add_scalars("parent", [0], [0.5], [1.0])
if child := os.fork():
    os.waitpid(child, 0)
    file.add_scalars("parent", [1], [0.5], [1.0])
else:
    file.add_scalars("child", [0], [0.5], [1.0])
"""
    run_python(program, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    records = EventAccumulator(str(tmp_path)).Reload()
    assert {tag: len(records.Scalars(tag)) for tag in ("parent", "child")} == {"parent": 2, "child": 1}


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes")
def test_what_a_full_disk_refused_follows_once_there_is_room(tmp_path: pathlib.Path, read_events: Read) -> None:
    program = """
import pathlib, resource, sys
from determined.tensorboard import EventFile
file = EventFile(pathlib.Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
file.add_scalars("loss", range(100), range(100), range(100))
try:
    file.flush()
except OSError:
    print("refused")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.add_scalars("loss", [100], [0.5], [1.0])
file.close()
"""
    assert run_python(program, tmp_path) == "refused\n"
    assert [event.step for event in read_events(tmp_path)] == list(range(101))


@pytest.mark.parametrize("steps", [[-1, 0], [0, -5], np.array([1, 2**63], dtype=np.uint64)])
def test_a_step_that_tensorboard_cannot_hold_is_refused(tmp_path: pathlib.Path, steps: Sequence[int]) -> None:
    bad = next(int(step) for step in steps if not 0 <= step < 2**63)
    with pytest.raises(ValueError, match=f"got step {bad}; .* 0 to"):
        EventFile(tmp_path).add_scalars("loss", steps, [1.0, 2.0], [1.0, 2.0])


def test_a_step_that_is_no_integer_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match=r"float64.*0\.5.*pass integers"):
        EventFile(tmp_path).add_scalars("loss", [0.5], [1.0], [1.0])


@pytest.mark.parametrize(
    ("steps", "values", "wall_times"),
    [([1], [], [1]), ([1, 2], [1, 2], [1]), ([], [1], []), ([[1]], [[1]], [[1]])],
)
def test_columns_of_different_shapes_are_refused(
    tmp_path: pathlib.Path, steps: list[int], values: list[float], wall_times: list[float]
) -> None:
    with pytest.raises(ValueError, match="pass three flat sequences of one length"):
        EventFile(tmp_path).add_scalars("loss", steps, values, wall_times)


def test_a_refused_window_leaves_no_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError):
        EventFile(tmp_path).add_scalars("loss", [-1], [1.0], [1.0])
    assert not list(tmp_path.iterdir())


def test_a_name_with_a_lone_surrogate_stays_legible(tmp_path: pathlib.Path, read_events: Read) -> None:
    file = EventFile(tmp_path)
    file.add_scalars("a\ud800b", [0], [1.0], [1.0])
    file.close()
    assert read_events(tmp_path)[0].summary.value[0].tag == "a\\ud800b"


def test_scalars_need_neither_torch_nor_tensorboard(tmp_path: pathlib.Path) -> None:
    program = """
import pathlib, sys
from determined.tensorboard import EventFile
import determined.tensorboard.metric_writers.pytorch
file = EventFile(pathlib.Path(sys.argv[1]))
file.add_scalars("loss", [7], [0.5], [1.0])
file.close()
print(sorted({"torch", "tensorboard"} & sys.modules.keys()))
"""
    assert run_python(program, tmp_path) == "[]\n"
