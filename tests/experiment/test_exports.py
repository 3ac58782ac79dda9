"""What `determined.experiment` exports, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from determined import experiment


@pytest.mark.parametrize("name", experiment.__all__)
def test_every_exported_name_can_be_loaded(name: str) -> None:
    assert getattr(experiment, name) is not None


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ("sqlalchemy", "torch", "yaml", "pydantic", "numpy")
    program = f"import sys, determined.experiment; print(*(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        experiment.nothing  # noqa: B018
