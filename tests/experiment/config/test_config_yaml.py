"""How YAML and JSON are read."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
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


HOSTILE = """
import resource, time
from determined.errors import InvalidConfig
from determined.experiment.config import parse

bomb = "data:\\n  a0: &a0 [x, x, x, x, x, x, x, x, x, x]\\n" + "".join(
    f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\\n" for n in range(1, 12)
)
maps = "data: &m0 {x: 1}\\n" + "".join(
    f"k{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 20)}]}}\\n" for n in range(1, 20)
)
texts = [bomb, maps, "[" * 10**5, "{a: " * 25_000, "- " * 50_000, "&a " * 30_000, "a: " + "x" * 99_000, "9" * 10**5]
texts += ["\\n".join(f"k{n}: {n}" for n in range(8_000)), "a: 1\\n" * 20_000, "x: 1e400", "x: \\0", "x" * 10**8]
texts += ["searcher: !!python/object/apply:os.system ['touch canary']"]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for text in texts:
    began = time.process_time()
    try:
        parse(text)
    except InvalidConfig as error:
        str(error)
    else:
        raise AssertionError(text[:80])
    took = time.process_time() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{text[:20]!r} {took:.2f} s {grown:.0f} MB")
    assert took < 2, f"{text[:80]!r} took {took:.1f} s"
    assert grown < 200, f"{text[:80]!r} took {grown:.0f} MB"
"""


def test_hostile_texts_are_refused_soon_within_little_memory_and_do_nothing(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", HOSTILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
