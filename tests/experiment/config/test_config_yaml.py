"""How YAML and JSON are read."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from determined.experiment.config import from_map, load, parse

SMALLEST: dict[str, Any] = {"searcher": {"name": "single", "metric": "loss"}}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1e-3", 0.001),
        ("-2E5", -2e5),
        ("+.5e1", 5.0),
        ("1.", 1.0),
        ("017", 15),
        ("0x1F", 31),
        ("1_000", 1000),
        ("2024-05-06", "2024-05-06"),
        ("10:30", "10:30"),
        ("8080:80", "8080:80"),
        ("1e3x", "1e3x"),
        ("08", "08"),
        ("=", "="),
        ("~", None),
        ("yes", True),
        ('"\\ud83d\\ude00"', "😀"),
    ],
)
def test_scalars_are_what_people_mean(written: str, meant: Any) -> None:
    read = parse(f"searcher: {{name: single, metric: loss}}\ndata: {{x: {written}}}").data["x"]
    assert (read, type(read)) == (meant, type(meant))


def test_aliases_and_merged_maps_are_expanded() -> None:
    text = """
    searcher: {name: single, metric: loss}
    data:
      base: &base {a: 1, b: {c: 2}}
      other: &other {a: 5, d: 4}
      both: {<<: [*base, *other], b: 3}
      same: *base
    """
    data = parse(text).data
    assert data["both"] == {"a": 1, "b": 3, "d": 4}
    assert data["same"] == {"a": 1, "b": {"c": 2}}


@pytest.mark.parametrize("indent", ["\t", 2, None])
def test_json_is_read_too(indent: Any) -> None:
    written = SMALLEST | {"name": "a", "description": "tab\there", "reproducibility": {"experiment_seed": 3}}
    assert parse(json.dumps(written, indent=indent)) == from_map(written)


def test_file_may_begin_with_a_byte_order_mark(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfsearcher: {name: single, metric: loss}\nname: caf\xc3\xa9")
    assert load(tmp_path / "a.yaml").name == "café"
