from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import determined.tensorboard
from determined.tensorboard import EventFile, current, set_current

Read = Callable[[pathlib.Path], list[Any]]


@pytest.fixture(autouse=True)
def _no_trial() -> Iterator[None]:
    yield
    set_current(None)


def test_a_running_trial_s_file_is_current(tmp_path: pathlib.Path) -> None:
    file = EventFile(tmp_path)
    set_current(lambda: file)
    assert current() is file


def test_without_a_trial_records_go_under_the_home_folder(home: pathlib.Path, read_events: Read) -> None:
    current().add_scalars("loss", [2], [0.5], [1.0])
    current().close()
    assert [event.step for event in read_events(home / "tensorboard" / "unattached")] == [2]


def test_without_a_trial_every_call_gives_the_same_file(home: pathlib.Path) -> None:
    assert current() is current()


def test_after_a_trial_its_file_is_current_no_more(tmp_path: pathlib.Path, home: pathlib.Path) -> None:
    set_current(lambda: EventFile(tmp_path))
    set_current(None)
    assert current().folder == home / "tensorboard" / "unattached"


def test_the_package_exports_these_names() -> None:
    assert determined.tensorboard.__all__ == ["EventFile", "current", "set_current", "summary_writer"]
