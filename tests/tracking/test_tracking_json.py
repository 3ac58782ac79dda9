from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from determined import tracking

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text()
    | st.from_regex(r"\\*-?(NaN|Infinity)", fullmatch=True),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, '"NaN"'),
        (-math.inf, '"-Infinity"'),
        (np.float32(0.5), "0.5"),
        (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
        (np.array([1.0, np.nan]), '[1.0, "NaN"]'),
        ({1: (2, 3)}, '{"1": [2, 3]}'),
        (pathlib.PurePosixPath("a/b"), '"a/b"'),
        (complex(1, 2), '"(1+2j)"'),
        (np.ndarray, "\"<class 'numpy.ndarray'>\""),
    ],
)
def test_what_json_cannot_hold_is_written_as_what_comes_closest(value: Any, expected: str) -> None:
    assert tracking.encode_json(value) == expected


def test_an_integer_too_long_for_decimal_digits_is_written_in_hexadecimal() -> None:
    assert json.loads(tracking.encode_json(2**20000)) == hex(2**20000)


@given(values)
def test_everything_written_is_strict_json(value: Any) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads(tracking.encode_json(value), parse_constant=refuse)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=values)
def test_metrics_come_back_as_they_were_reported(
    value: Any, writer: tracking.TrialWriter, reader: tracking.TrackingReader
) -> None:
    writer.write([tracking.MetricReport(group="g", steps_completed=1, metrics={"m": value}, time=0.0)])
    stored = reader.metrics(writer.trial_id, "g")[-1].metrics["m"]
    assert repr(stored) == repr(value)
