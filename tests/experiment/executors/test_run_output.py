"""What runs write, from their pipes to the files that are read."""

from __future__ import annotations

import pathlib
import sys
import time

import pytest
from executor_runs import Runs
from hypothesis import given
from hypothesis import strategies as st

from determined.experiment.executors import EndReason
from determined.experiment.executors.local._log import ScreenLines
from determined.processes import MAX_LINE, LineCutter
from disks import small_disk

pytestmark = pytest.mark.process


def cut(*parts: bytes, times: list[float] | None = None) -> list[str]:
    cutter, screen = LineCutter(), ScreenLines()
    fed = [
        line
        for part, now in zip(parts, times or [0.0] * len(parts), strict=True)
        for line in screen.see(cutter.feed(part), now)
    ]
    return fed + screen.end(cutter.end())


def test_line_waits_for_its_end() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"one\ntw") == [b"one\n"]
    assert cutter.feed(b"o\n") == [b"two\n"]


def test_last_line_needs_no_end() -> None:
    assert cut(b"one\ntwo") == ["one", "two"]


def test_empty_lines_count() -> None:
    assert cut(b"\n\none\n\n") == ["", "", "one", ""]


def test_line_ends_of_windows_are_line_ends() -> None:
    assert cut(b"one\r", b"\ntwo\r\n") == ["one", "two"]


def test_progress_bar_is_seen_once_a_second_and_as_it_was_last() -> None:
    bar = [f"\r{number:3}%".encode() for number in range(0, 100, 10)]
    times = [number * 0.25 for number in range(len(bar))]
    assert cut(*bar, b"\r100%\n", times=[*times, 3.0]) == ["  0%", " 40%", " 80%", "100%"]


def test_line_that_is_taken_back_without_anything_new_is_there() -> None:
    assert cut(b"10%\r20%\r\n") == ["10%", "20%"]
    assert cut(b"10%\r20%\r") == ["10%", "20%"]
    assert cut(b"10%\r\r\nnext\n") == ["10%", "next"]


def test_very_long_line_is_cut_between_characters() -> None:
    lines = cut(b"x" + "ä".encode() * MAX_LINE + b"\n")
    assert "".join(lines) == "x" + "ä" * MAX_LINE
    assert all(len(line.encode()) <= MAX_LINE for line in lines)
    assert len(lines) == 3


def test_what_is_not_text_stays_readable() -> None:
    assert cut(b"caf\xe9 \xff\0\n") == ["caf\\xe9 \\xff\\x00"]


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", "é".encode(), b"\xff"]), max_size=12), st.data())
def test_lines_do_not_depend_on_how_they_come(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    places = data.draw(st.lists(st.integers(0, len(whole)), max_size=4).map(sorted))
    pieces = [whole[begin:end] for begin, end in zip([0, *places], [*places, len(whole)], strict=True)]
    assert cut(*pieces) == cut(whole)


@given(st.text(st.characters(exclude_characters="\r\0", exclude_categories=["Cs"])))
def test_text_without_rewriting_is_kept(text: str) -> None:
    expected = text.split("\n")
    assert cut(text.encode()) == (expected if expected[-1] else expected[:-1])


def test_lines_have_their_time_rank_and_stream(runs: Runs) -> None:
    before = time.time()
    spec = runs.spec("echo out; echo err >&2")
    runs.run(spec)
    lines = runs.lines(spec)
    assert sorted((line.run, line.rank, line.stream, line.text) for line in lines) == [
        (1, 0, "stderr", "err"),
        (1, 0, "stdout", "out"),
    ]
    assert all(before - 0.001 <= line.time <= time.time() for line in lines)


def test_file_is_made_of_three_columns(runs: Runs) -> None:
    spec = runs.spec("printf 'with\\ttab\\n'")
    runs.run(spec)
    when, stream, text = spec.files.log(0).read_text().rstrip("\n").split("\t", 2)
    assert (stream, text) == ("stdout", "with\ttab")
    assert len(when) == len("2026-01-02T03:04:05.678901Z")
    assert when.endswith("Z")


def test_output_can_be_read_while_it_comes(runs: Runs) -> None:
    runs.write("import time; print('half'); time.sleep(600)", "train.py")
    spec = runs.start(runs.spec(f"{sys.executable} train.py"))
    runs.await_text(spec, "half")
    assert spec.trial_id in runs.going


def test_burst_is_complete_and_in_order(runs: Runs) -> None:
    runs.write(
        """
        import os
        data = b"".join(b"line %d\\n" % number for number in range(100_000))
        while data:
            data = data[os.write(1, data):]
        """,
        "train.py",
    )
    spec = runs.spec([sys.executable, "train.py"])
    runs.run(spec)
    assert [line.text for line in runs.lines(spec)] == [f"line {number}" for number in range(100_000)]


def test_last_words_of_a_killed_process_are_kept(runs: Runs) -> None:
    spec = runs.spec("printf 'no line end'; kill -9 $$")
    runs.run(spec)
    assert runs.text(spec) == "no line end\n"


def test_full_disk_is_no_reason_to_fail(runs: Runs) -> None:
    spec = runs.spec("echo lost; echo done > $DET_RUN_FOLDER/done")
    spec.folder.mkdir(parents=True)
    spec.files.log(0).symlink_to("/dev/full")
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert (spec.folder / "done").exists()
    spec.files.log(0).unlink()


def test_a_run_begins_once_the_disk_has_room_for_its_folder(runs: Runs) -> None:
    spec = runs.spec("echo begun")
    with small_disk(spec.folder.parent, "64k") as disk:
        disk.fill()
        runs.start(spec)
        runs.collect(1.0)
        assert runs.going == {spec.trial_id}
        disk.empty()
        assert runs.end(spec).reason is EndReason.COMPLETED
        assert runs.text(spec) == "begun\n"


def test_a_run_that_waits_for_room_on_the_disk_can_be_stopped(runs: Runs) -> None:
    spec = runs.spec("echo begun")
    with small_disk(spec.folder.parent, "64k") as disk:
        disk.fill()
        runs.start(spec)
        runs.executor.stop(spec.trial_id)
        assert runs.end(spec).reason is EndReason.STOPPED
        assert runs.text(spec) == ""


def test_a_run_whose_log_cannot_be_opened_has_not_failed_to_start_for_good(runs: Runs) -> None:
    spec = runs.spec("echo begun")
    spec.files.log(0).mkdir(parents=True)
    ended = runs.run(spec)
    assert ended.reason is EndReason.KILLED
    assert "IsADirectoryError" in ended.message


def test_lines_that_a_full_disk_swallowed_are_counted(tmp_path: pathlib.Path) -> None:
    import resource
    import signal

    from determined.experiment.executors.local._log import LogFile

    file = LogFile(tmp_path / "rank-0.log")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60, before[1]))
        file.write("stdout", ["fits", "is torn apart"])
        file.write("stdout", ["lost"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    file.write("stdout", ["fits again"])
    file.close()
    texts = [line.split("\t", 2)[-1] for line in (tmp_path / "rank-0.log").read_text().splitlines()]
    assert texts[0] == "fits"
    assert texts[2:] == ["[3 lines of output are missing here: they could not be written]", "fits again"]


def test_pipe_that_others_hold_open_does_not_hold_up_the_end(runs: Runs) -> None:
    spec = runs.spec("setsid sleep 600 & echo end")
    assert runs.run(spec).reason is EndReason.COMPLETED
    assert runs.text(spec) == "end\n"
