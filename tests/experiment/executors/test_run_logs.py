"""Reading the output of a trial's runs."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from determined.experiment.executors import LogLine, follow_logs, read_logs
from determined.experiment.executors._logs import stamp

pytestmark = pytest.mark.process

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Write:
    """Writes lines of a rank of a run, each with its time."""

    def write(run: int, rank: int, *lines: tuple[float, str]) -> None:
        path = tmp_path / f"run-{run}" / f"rank-{rank}.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{stamp(when)}\tstdout\t{text}\n" for when, text in lines)

    return write


def texts(lines: object) -> list[str]:
    return [line.text for line in lines]  # type: ignore[attr-defined]


def test_trial_without_runs_has_no_lines(tmp_path: pathlib.Path) -> None:
    assert list(read_logs(tmp_path / "trial-1")) == []
    assert list(read_logs(tmp_path, tail=3)) == []


def test_line_is_what_was_written(tmp_path: pathlib.Path, write: Write) -> None:
    write(2, 1, (1700000000.123456, "a\tb"))
    assert list(read_logs(tmp_path)) == [LogLine(1700000000.123456, 2, 1, "stdout", "a\tb")]


def test_runs_and_ranks_are_in_the_order_of_time(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, (1.0, "a"), (4.0, "d"))
    write(1, 1, (2.0, "b"), (3.0, "c"))
    write(2, 0, (5.0, "e"))
    write(10, 0, (6.0, "f"))
    assert texts(read_logs(tmp_path)) == list("abcdef")


def test_lines_of_one_rank_stay_in_order_when_the_clock_goes_back(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, (5.0, "a"), (2.0, "b"), (6.0, "c"))
    assert texts(read_logs(tmp_path)) == list("abc")


@pytest.mark.parametrize("limit", [{}, {"tail": 10**6}], ids=["from the first", "from the last"])
def test_of_a_long_log_only_the_part_since_a_time_is_read(
    limit: dict[str, int], tmp_path: pathlib.Path, write: Write
) -> None:
    write(1, 0, *((float(number), f"{number} {'x' * 200}") for number in range(40_000)))
    before = psutil.Process().io_counters().read_chars
    found = texts(read_logs(tmp_path, since=39_900.0, **limit))
    read = psutil.Process().io_counters().read_chars - before
    assert [text.split()[0] for text in found] == [str(number) for number in range(39_900, 40_000)]
    assert read < (tmp_path / "run-1" / "rank-0.log").stat().st_size / 10


def test_every_time_in_a_long_log_can_be_asked_for(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, *((float(number), "x" * (number * 7919 % 3000)) for number in range(1000)))
    for since in range(0, 1000, 37):
        assert len(list(read_logs(tmp_path, since=float(since), tail=1001))) == 1000 - since
        assert next(read_logs(tmp_path, since=float(since), head=1)).time == since


def test_some_ranks_only(tmp_path: pathlib.Path, write: Write) -> None:
    for rank in range(3):
        write(1, rank, (float(rank), f"{rank}"))
    assert texts(read_logs(tmp_path, ranks=[0, 2])) == ["0", "2"]


def test_from_a_time_to_a_time(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, *((float(number), f"{number}") for number in range(10)))
    assert texts(read_logs(tmp_path, since=3.0, until=5.0)) == ["3", "4", "5"]


@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_first_and_last_lines(count: int, tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, *((float(number), f"{number}") for number in range(0, 20, 2)))
    write(2, 0, *((float(number), f"{number}") for number in range(1, 20, 2)))
    everything = [f"{number}" for number in range(20)]
    assert texts(read_logs(tmp_path, head=count)) == everything[:count]
    assert texts(read_logs(tmp_path, tail=count)) == everything[max(0, 20 - count) :]


def test_last_lines_of_a_large_file(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, *((float(number), f"{number} {'x' * (number % 700)}") for number in range(2000)))
    assert texts(read_logs(tmp_path, tail=1500)) == texts(read_logs(tmp_path))[-1500:]


def test_last_lines_before_a_time(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, *((float(number), f"{number}") for number in range(10)))
    assert texts(read_logs(tmp_path, until=6.0, tail=2)) == ["5", "6"]


def test_line_without_an_end_is_not_there_yet(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, (1.0, "whole"))
    with (tmp_path / "run-1" / "rank-0.log").open("a") as file:
        file.write(f"{stamp(2.0)}\tstdout\thalf")
    assert texts(read_logs(tmp_path)) == texts(read_logs(tmp_path, tail=5)) == ["whole"]


def test_torn_lines_are_left_out(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, (1.0, "one"))
    with (tmp_path / "run-1" / "rank-0.log").open("a") as file:
        file.write("2026-01-0\n\nnot\ta\ttime\n")
    write(1, 0, (2.0, "two"))
    assert texts(read_logs(tmp_path)) == ["one", "two"]


def test_other_files_of_a_run_are_left_alone(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, (1.0, "one"))
    for name in ("rank-x.log", "exit.json", "rank-1.log.old"):
        (tmp_path / "run-1" / name).write_text("x")
    (tmp_path / "run-old").mkdir()
    assert texts(read_logs(tmp_path)) == ["one"]


def followed(tmp_path: pathlib.Path, steps: list[Callable[[], None]], **options: object) -> list[str]:
    """Return what is followed while steps are taken, one each time that all before was read."""
    over = threading.Event()
    pending = list(steps)

    def is_over() -> bool:
        if pending:
            pending.pop(0)()
            return False
        over.set()
        return True

    return texts(follow_logs(tmp_path, is_over, **options))  # type: ignore[arg-type]


def test_following_gives_lines_as_they_come(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, (1.0, "a"))
    steps = [
        lambda: write(1, 0, (2.0, "b")),
        lambda: write(1, 1, (3.0, "c")),
        lambda: write(2, 0, (5.0, "e"), (6.0, "f")) or write(1, 0, (4.0, "d")),  # type: ignore[func-returns-value]
    ]
    assert followed(tmp_path, steps) == list("abcdef")


def test_following_begins_with_the_last_lines(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, *((float(number), f"{number}") for number in range(5)))
    assert followed(tmp_path, [lambda: write(1, 0, (9.0, "new"))], tail=2) == ["3", "4", "new"]


def test_following_waits_for_whole_lines(tmp_path: pathlib.Path, write: Write) -> None:
    def half() -> None:
        with (tmp_path / "run-1" / "rank-0.log").open("a") as file:
            file.write(f"{stamp(2.0)}\tstdout\tha")

    def other_half() -> None:
        with (tmp_path / "run-1" / "rank-0.log").open("a") as file:
            file.write("lf\n")

    write(1, 0, (1.0, "whole"))
    assert followed(tmp_path, [half, other_half]) == ["whole", "half"]


def test_following_leaves_out_what_was_not_asked_for(tmp_path: pathlib.Path, write: Write) -> None:
    write(1, 0, (1.0, "old"), (5.0, "new"))
    write(1, 1, (5.0, "other rank"))
    assert followed(tmp_path, [], ranks=[0], since=2.0) == ["new"]


def test_following_does_not_miss_what_comes_just_before_the_end(tmp_path: pathlib.Path, write: Write) -> None:
    begun = time.monotonic()

    def is_over() -> bool:
        write(1, 0, (time.monotonic() - begun, "last"))
        return True

    assert texts(follow_logs(tmp_path, is_over)) == ["last"]
