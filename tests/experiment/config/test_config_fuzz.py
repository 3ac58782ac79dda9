"""Any text and any map is either a config, which reads back as itself, or refused with InvalidConfig: nothing else.

With `--hypothesis-profile=torture` these are some 100,000, none of which may take a second.
"""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from determined.errors import InvalidConfig
from determined.experiment.config import ExperimentConfig, from_map, load, parse

unhurried = settings(suppress_health_check=[HealthCheck.too_slow])
often = settings(unhurried, max_examples=3 * settings.default.max_examples)

GOOD = """\
name: digits
labels: [a, b]
workspace: w
project: p
entrypoint: model_def:Trial
hyperparameters:
  global_batch_size: 64
  lr: {type: log, minval: -4, maxval: -1, count: 3}
  net: {width: {type: int, minval: 8, maxval: 64, count: 2}, act: {type: categorical, vals: [relu, gelu]}}
  dropout: {type: double, minval: 0.1, maxval: 0.5, count: 2}
searcher: {name: adaptive_asha, metric: loss, max_trials: 9, time_metric: epochs, max_time: 9, bracket_rungs: [2, 1]}
resources: {slots_per_trial: 2, max_slots: 4, priority: 3}
min_validation_period: {epochs: 1}
checkpoint_storage: {type: s3, bucket: b, access_key: k, secret_key: s, save_trial_best: 2}
optimizations: {mixed_precision: bf16, compile: {dynamic: true}}
environment: {environment_variables: [A=b], image: x}
log_policies: [{name: n, pattern: a+, action: cancel_retries}]
reproducibility: {experiment_seed: 7}
data: {path: /data, secrets: {a: 1}}
"""

# Words that mean something somewhere in a config, so that random trees reach far.
WORDS = [
    *ExperimentConfig.model_fields,
    *yaml.safe_load(GOOD)["searcher"],
    *("type", "int", "double", "log", "const", "categorical", "minval", "maxval", "count", "val", "vals", "single"),
    *("random", "grid", "async_halving", "num_rungs", "max_length", "records", "batches", "epochs", "divisor", "s3"),
    *("shared_fs", "host_path", "azure", "container", "global_batch_size", "environment_variables", "cpu", "pattern"),
]
SIGNS = [*"[]{}:,-?&*!|>'\"%@`#~ \n\tab01.<", "<<", ": ", "- ", "&a ", "*a "]
TEXTS = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    TEXTS,
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS | st.integers(), inner, max_size=4)),
    max_leaves=15,
)
MAPS = st.dictionaries(TEXTS, TREES, max_size=6)
SEARCHERS = st.one_of(
    TREES,
    st.builds(
        lambda name, rest: rest | {"name": name}, st.sampled_from(["single", "random", "grid", "adaptive_asha"]), MAPS
    ),
)


def read(make: Callable[[], ExperimentConfig]) -> ExperimentConfig | None:
    """The config, checked to be the same when read back; None if it was refused, with problems that can be shown."""
    try:
        made = make()
    except InvalidConfig as refusal:
        check_refusal(refusal)
        return None
    written = json.dumps(made.to_dict(), allow_nan=False)
    again = from_map(json.loads(written))
    assert again == made
    assert json.dumps(again.to_dict()) == written
    made.masked()
    assert isinstance(made.notes, tuple)
    return made


def check_refusal(error: InvalidConfig) -> None:
    assert error.problems
    assert all(problem.rule and problem.remedy for problem in error.problems)
    str(error).encode()


def test_config_that_is_changed_here_is_good() -> None:
    assert read(lambda: parse(GOOD))


@given(st.text(max_size=200))
@unhurried
def test_any_text(text: str) -> None:
    read(lambda: parse(text))


@given(st.lists(st.sampled_from(SIGNS), max_size=60))
@unhurried
def test_any_text_of_signs_that_mean_something_in_yaml(signs: list[str]) -> None:
    read(lambda: parse("".join(signs)))


@given(st.binary(max_size=200))
@unhurried
def test_any_file(content: bytes) -> None:
    path = pathlib.Path("config.yaml")
    path.write_bytes(content)
    read(lambda: load(path))


@given(TREES)
@unhurried
def test_any_tree(tree: Any) -> None:
    read(lambda: from_map(tree))


@given(MAPS, SEARCHERS)
@unhurried
def test_any_map_with_a_searcher(tree: dict[str, Any], searcher: Any) -> None:
    read(lambda: from_map(tree | {"searcher": searcher}))


@given(st.data())
@often
def test_good_config_with_other_values(data: st.DataObject) -> None:
    tree = yaml.safe_load(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        change(tree, data)
    made = read(lambda: from_map(tree))
    if made is not None:
        read(lambda: parse(json.dumps(tree)))


@given(st.data())
@often
def test_good_text_with_other_signs(data: st.DataObject) -> None:
    text = GOOD
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.integers(0, 6))
        put = data.draw(
            st.one_of(st.sampled_from(["", "\n", "\t", ":", "- ", "{", "}", "1e400", ".nan", "&a ", "*a"]), TEXTS)
        )
        text = text[:start] + put + text[end:]
    read(lambda: parse(text))


@given(st.text(max_size=20), TREES)
@unhurried
def test_any_override(path: str, value: Any) -> None:
    read(lambda: parse(GOOD, overrides=[path, f"{path}={value}", f"data.x={value!r}"]))


def change(tree: Any, data: st.DataObject) -> None:
    """Walk to a random place below a map or list, and put something else there, or nothing, or under another key."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        inner = tree[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.integers(0, 3)) == 0:
            break
        tree = inner
    action = data.draw(st.sampled_from(["replace", "delete", "rename", "copy"]))
    if action == "replace" or not isinstance(tree, dict):
        tree[key] = data.draw(TREES)
    elif action == "delete":
        del tree[key]
    else:
        value = copy.deepcopy(tree[key]) if action == "copy" else tree.pop(key)
        tree[data.draw(TEXTS)] = value


@pytest.fixture(autouse=True)
def own_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
