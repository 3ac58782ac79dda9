"""Values and names that programs report: any of them is stored, and read as it was reported."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from determined import tracking

finite = st.floats(allow_nan=False, allow_infinity=False)
# A text that spells a number which is not finite comes back as that number.
texts = st.text().filter(lambda text: text not in ("NaN", "Infinity", "-Infinity"))
reported = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.lists(finite, max_size=3)
numbers = itertools.count()
names = st.text(min_size=1) | st.text(st.characters(categories=["Cs", "Cc"]), min_size=1)
HOSTILE = ["<script>alert(1)</script>", "'; DROP TABLE metrics; --", "[red]x", "\x1b[2J", "\ud800", "a\0b", "x" * 10**6]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metrics=st.dictionaries(names, reported, max_size=4))
@example(metrics=dict.fromkeys(HOSTILE, 1.0))
@example(metrics={"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "none": None, "huge": 10**2000})
def test_metrics_of_any_name_and_value_are_stored_faithfully(
    metrics: dict[str, Any], writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    group = f"group {next(numbers)}"
    writer.write([tracking.MetricReport(group=group, steps_completed=1, metrics=metrics, time=0.0)])
    (stored,) = reader.metrics(writer.trial_id, group)
    assert repr(dict(stored.metrics)) == repr({joined(name): joined(value) for name, value in metrics.items()})


def joined(value: Any) -> Any:
    """What JSON makes of a text: halves of a character side by side become that character."""
    is_text = isinstance(value, str)
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") if is_text else value


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:20])
def test_experiments_and_hyperparameters_of_any_name_are_stored(
    name: str, database: pathlib.Path, describe_run: Any
) -> None:
    with tracking.TrialWriter.start(
        database, describe_run(name=name, hparams={name: name}, config={name: 1})
    ) as writer:
        writer.write([tracking.MetricReport(group=name, steps_completed=1, metrics={"a": 1}, time=0.0)])
    reader = tracking.TrackingReader(database)
    assert reader.trial(1).hparams == {name: name}
    assert reader.experiment(1).config == {name: 1}
    escaped = name.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    assert reader.experiment(1).name == escaped
    assert len(reader.metrics(1, group=name)) == 1


def test_groups_with_names_that_differ_only_far_out_stay_apart(
    writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    groups = ["x" * 10**6 + "a", "x" * 10**6 + "b"]
    for group in groups:
        writer.write([tracking.MetricReport(group=group, steps_completed=1, metrics={"is": group[-1]}, time=0.0)])
    for group in groups:
        (report,) = reader.metrics(writer.trial_id, group)
        assert report.metrics == {"is": group[-1]}
        assert len(report.group) <= 400
        assert report.group.startswith("x" * 380)
