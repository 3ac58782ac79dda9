"""One checkpoint for all tests that only read or damage one: each gets a copy."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from determined._home import home
from saving import save


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint of one batch, in a home of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("DET_PROGRESS", "0")
        return save()


@pytest.fixture
def checkpoint(saved: pathlib.Path) -> pathlib.Path:
    """A copy of that checkpoint among those of this test's home."""
    return pathlib.Path(shutil.copytree(saved, home().checkpoints / saved.name))
