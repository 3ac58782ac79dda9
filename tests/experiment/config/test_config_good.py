"""Configs that are right: what they mean, and what is filled in."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy
import pytest

from determined.errors import InvalidConfig
from determined.experiment.config import (
    AdaptiveAshaSearcher,
    AsyncHalvingSearcher,
    Categorical,
    Const,
    CustomSearcher,
    Double,
    ExperimentConfig,
    GpSearcher,
    GridSearcher,
    Int,
    Length,
    Log,
    RandomSearcher,
    SingleSearcher,
    SlotRange,
    TpeSearcher,
    from_map,
    parse,
    read,
)
from determined.storage import _base, store_for

SMALLEST: dict[str, Any] = {"searcher": {"name": "single", "metric": "loss"}}


def config(**changes: Any) -> ExperimentConfig:
    return from_map(SMALLEST | changes)


def searcher(**keys: Any) -> Any:
    return from_map({"searcher": {"metric": "loss"} | keys}).searcher


def test_searcher_is_all_that_is_needed() -> None:
    assert parse("searcher: {name: single, metric: loss}").searcher == SingleSearcher(metric="loss")


def test_every_default_is_filled_in() -> None:
    filled = config(name="a", reproducibility={"experiment_seed": 7}).to_dict()
    used = {name: value for name, value in filled.items() if value is not None}
    assert used == {
        "name": "a",
        "labels": [],
        "workspace": "",
        "project": "",
        "hyperparameters": {},
        "searcher": {
            "name": "single",
            "metric": "loss",
            "smaller_is_better": True,
            "max_length": None,
            "source_trial_id": None,
            "source_checkpoint_uuid": None,
        },
        "resources": dict.fromkeys(
            ("max_slots", "priority", "weight", "resource_pool", "shm_size", "is_single_node", "devices")
        )
        | {"slots_per_trial": 1},
        "max_restarts": 5,
        "min_validation_period": {"batches": 0},
        "min_checkpoint_period": {"batches": 0},
        "checkpoint_policy": "best",
        "checkpoint_storage": {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1},
        "perform_initial_validation": False,
        "scheduling_unit": 100,
        "records_per_epoch": 0,
        "optimizations": filled["optimizations"],
        "profiling": {"enabled": False, "begin_on_batch": 0, "end_after_batch": None, "sync_timings": True},
        "reproducibility": {"experiment_seed": 7},
        "data": {},
        "environment": filled["environment"],
        "preemption_timeout": 3600,
        "log_policies": [],
        "retention_policy": {"log_retention_days": None},
        "debug": False,
        "slurm": {"slots_per_node": None, "gpu_type": None, "sbatch_args": []},
    }


def test_optimizations_are_off_or_left_to_torch_by_default() -> None:
    filled = config().to_dict()["optimizations"]
    assert {name: value for name, value in filled.items() if value is not None} == {
        "aggregation_frequency": 1,
        "average_aggregated_gradients": True,
        "gradient_compression": False,
        "compile": False,
        "channels_last": False,
        "cuda_graphs": False,
    }


def test_map_is_plain_json() -> None:
    filled = config(hyperparameters={"a": {"type": "int", "minval": 1, "maxval": 2}}).to_dict()
    assert json.loads(json.dumps(filled)) == filled


def test_null_means_the_default() -> None:
    names = [name for name in ExperimentConfig.model_fields if name not in ("searcher", "name", "reproducibility")]
    assert from_map(SMALLEST | dict.fromkeys(names)).to_dict() | {"name": "", "reproducibility": {}} == (
        config().to_dict() | {"name": "", "reproducibility": {}}
    )


def test_null_within_a_section_means_the_default() -> None:
    assert config(resources={"slots_per_trial": None, "max_slots": 3}).resources.slots_per_trial == 1


def test_slots_per_trial_may_be_a_range() -> None:
    elastic = config(resources={"slots_per_trial": {"min": 2, "max": 8}, "max_slots": 4})
    assert elastic.resources.slot_range == SlotRange(min=2, max=8)
    assert elastic.to_dict()["resources"]["slots_per_trial"] == {"min": 2, "max": 8}
    assert from_map(elastic.to_dict()) == elastic
    assert config(resources={"slots_per_trial": 3}).resources.slot_range == SlotRange(min=3, max=3)
    assert config(resources={"slots_per_trial": {"max": 3}}).resources.slot_range == SlotRange(min=1, max=3)


def test_seed_is_the_time_if_none_is_given() -> None:
    before = int(time.time())
    assert before <= config().seed <= time.time()
    assert config(reproducibility={"experiment_seed": 2**32 - 1}).seed == 2**32 - 1


def test_generated_names_are_two_words_that_differ() -> None:
    names = [config().name for _ in range(20)]
    assert all(len(name.split("-")) == 2 and name.replace("-", "").isalpha() for name in names)
    assert len(set(names)) > 10


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"name": "single", "max_length": 5}, SingleSearcher(metric="loss", max_length=Length(batches=5))),
        ({"name": "random", "max_trials": 3}, RandomSearcher(metric="loss", max_trials=3, max_concurrent_trials=16)),
        ({"name": "grid", "max_concurrent_trials": 0}, GridSearcher(metric="loss", max_concurrent_trials=0)),
        (
            {"name": "async_halving", "num_rungs": 3, "max_trials": 9, "time_metric": "epochs", "max_time": 9},
            AsyncHalvingSearcher(
                metric="loss", num_rungs=3, max_trials=9, time_metric="epochs", max_time=9, divisor=4.0
            ),
        ),
        (
            {"name": "adaptive_asha", "max_trials": 9, "time_metric": "x", "max_time": 9, "bracket_rungs": [3, 1]},
            AdaptiveAshaSearcher(
                metric="loss",
                max_trials=9,
                time_metric="x",
                max_time=9,
                mode="standard",
                divisor=4.0,
                max_rungs=5,
                max_concurrent_trials=16,
                bracket_rungs=[3, 1],
            ),
        ),
        ({"name": "tpe", "max_trials": 3}, TpeSearcher(metric="loss", max_trials=3, n_startup_trials=10)),
        (
            {"name": "gp", "max_trials": 3, "n_startup_trials": 0},
            GpSearcher(metric="loss", max_trials=3, n_startup_trials=0),
        ),
        (
            {"name": "custom", "method": "a.b:C", "options": {"x": [1]}},
            CustomSearcher(metric="loss", method="a.b:C", options={"x": [1]}),
        ),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_searcher_is_of_the_named_kind(keys: dict[str, Any], expected: Any) -> None:
    assert searcher(**keys) == expected


def test_hyperparameters_are_constants_ranges_choices_and_maps_of_them() -> None:
    text = """
    searcher: {name: single, metric: loss}
    hyperparameters:
      lr: {type: log, minval: -4, maxval: -1, count: 3}
      base2: {type: log, base: 2, minval: 1, maxval: 3}
      width: {type: int, minval: 8, maxval: 64}
      dropout: {type: double, minval: 0, maxval: 0.5}
      act: {type: categorical, vals: [relu, null, [1, 2], {a: 1}]}
      depth: 3
      layers: [1, 2]
      nothing: null
      kept: {type: const, val: {a: {type: int}}}
      net: {depth: 2, inner: {width: {type: int, minval: 1, maxval: 2}}}
      empty: {}
    """
    assert parse(text).hyperparameters == {
        "lr": Log(minval=-4.0, maxval=-1.0, count=3, base=10.0),
        "base2": Log(base=2.0, minval=1.0, maxval=3.0),
        "width": Int(minval=8, maxval=64),
        "dropout": Double(minval=0.0, maxval=0.5),
        "act": Categorical(vals=["relu", None, [1, 2], {"a": 1}]),
        "depth": Const(val=3),
        "layers": Const(val=[1, 2]),
        "nothing": Const(val=None),
        "kept": Const(val={"a": {"type": "int"}}),
        "net": {"depth": Const(val=2), "inner": {"width": Int(minval=1, maxval=2)}},
        "empty": {},
    }


def test_hyperparameter_may_be_called_type() -> None:
    text = """
    searcher: {name: single, metric: loss}
    hyperparameters:
      type: adam
      optimizer: {type: {type: const, val: sgd}, lr: 0.1}
      scheduler: {type: {type: categorical, vals: [a, b]}}
      net: {type: resnet, depth: {type: int, minval: 1, maxval: 9}}
    """
    assert parse(text).hyperparameters == {
        "type": Const(val="adam"),
        "optimizer": {"type": Const(val="sgd"), "lr": Const(val=0.1)},
        "scheduler": {"type": Categorical(vals=["a", "b"])},
        "net": {"type": Const(val="resnet"), "depth": Int(minval=1, maxval=9)},
    }


@pytest.mark.parametrize("name", ["const", "int", "nested", "single", "count", "a.b", ""])
def test_name_of_a_hyperparameter_is_free(name: str) -> None:
    assert config(hyperparameters={name: {name: 3}}).hyperparameters == {name: {name: Const(val=3)}}


@pytest.mark.parametrize(
    ("entrypoint", "trial_class"),
    [
        ("model_def:Trial", "model_def:Trial"),
        (" pkg.mod:Outer.Trial ", "pkg.mod:Outer.Trial"),
        ("python3 train.py", None),
        ("./run:me", None),
        ("a:b:c", None),
        (["model_def:Trial"], None),
        (None, None),
    ],
)
def test_trial_class_is_recognised(entrypoint: Any, trial_class: str | None) -> None:
    made = from_map({"entrypoint": entrypoint, "searcher": {"name": "single", "metric": "loss", "max_length": 3}})
    assert (made.trial_class, made.entrypoint) == (trial_class, entrypoint)


def test_length_knows_its_unit() -> None:
    length = config(min_validation_period={"records": 7}).min_validation_period
    assert (length.unit, length.count) == ("records", 7)


def test_length_may_be_null_in_other_units() -> None:
    assert config(min_validation_period={"epochs": 2, "batches": None}).min_validation_period == Length(epochs=2)


def test_environment_variables_are_for_all_devices_or_for_some() -> None:
    same = config(environment={"environment_variables": ["A=1", "B=x=y", "C="]}).environment
    assert same.variables("cpu") == same.variables("cuda") == {"A": "1", "B": "x=y", "C": ""}
    some = config(environment={"environment_variables": {"cpu": ["A=1"], "cuda": ["A=2"]}}).environment
    assert (some.variables("cpu"), some.variables("cuda"), some.variables("rocm")) == ({"A": "1"}, {"A": "2"}, {})


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"save_trial_best": 3},
        {"type": "shared_fs", "host_path": "/a"},
        {"type": "shared_fs", "host_path": "/a/", "storage_path": "b/../c", "save_trial_latest": 0},
        {"type": "shared_fs", "host_path": "/a", "storage_path": "/a/b"},
        {"type": "directory", "container_path": "/a"},
    ],
)
def test_folders_for_checkpoints_are_those_of_the_store(section: dict[str, Any], tmp_path: pathlib.Path) -> None:
    filled = config(checkpoint_storage=section).to_dict()["checkpoint_storage"]
    retention = {"save_experiment_best", "save_trial_best", "save_trial_latest", "propagation"}
    written = {name: value for name, value in filled.items() if name not in retention}
    assert store_for(filled, tmp_path).root == store_for(written, tmp_path).root


@pytest.mark.parametrize(
    "section",
    [
        {"type": "gcs", "bucket": "b", "prefix": "a/b"},
        {"type": "s3", "bucket": "b", "access_key": "k", "secret_key": "s", "endpoint_url": "http://localhost:9000"},
        {"type": "azure", "container": "c", "connection_string": "s"},
        {"type": "azure", "container": "c", "account_url": "https://a", "credential": "k"},
    ],
)
def test_cloud_storage_is_accepted(section: dict[str, Any]) -> None:
    filled = config(checkpoint_storage=section).to_dict()["checkpoint_storage"]
    assert {name: filled[name] for name in section} == section


def test_values_of_other_libraries_become_plain() -> None:
    class Own(dict[str, Any]):
        """A map of another type."""

    made = config(data=Own(a=numpy.int64(3), b=numpy.float32(0.5), c=(1, 2), d=numpy.str_("x")))
    assert json.dumps(made.to_dict()["data"]) == '{"a": 3, "b": 0.5, "c": [1, 2], "d": "x"}'


def test_map_that_is_given_stays_as_it_is() -> None:
    given: Mapping[str, Any] = {
        "searcher": {"name": "adaptive_asha", "metric": "loss", "max_trials": 3, "max_length": {"batches": 9}},
        "resources": {"slots_per_trial": 0},
        "log_policies": [{"pattern": "a", "action": {"type": "cancel_retries"}}],
    }
    before = json.dumps(given)
    from_map(given).to_dict()["searcher"]["max_time"] = 3
    assert json.dumps(given) == before


def test_config_cannot_be_changed() -> None:
    made = config()
    with pytest.raises(ValueError, match="frozen"):
        made.max_restarts = 3  # type: ignore[misc]


def test_configs_are_equal_if_they_mean_the_same() -> None:
    one = config(name="a", reproducibility={"experiment_seed": 1}, min_validation_period=3)
    other = config(name="a", reproducibility={"experiment_seed": 1}, min_validation_period={"batches": 3}, debug=None)
    assert one == other
    assert one != config(name="a", reproducibility={"experiment_seed": 2})
    assert one != one.to_dict()


def test_map_of_a_file_can_be_had_as_it_is_written(tmp_path: pathlib.Path) -> None:
    text = "searcher: {name: null, metric: a, max_length: 3}\nresources: {slots_per_trial: 0}\nmin_checkpoint_period: 7"
    (tmp_path / "a.yaml").write_text(text)
    assumed = {"searcher": {"name": "adaptive_asha", "max_trials": 3}}
    assert read(tmp_path / "a.yaml", assumed) == {
        "searcher": {"name": None, "metric": "a", "max_length": 3},
        "resources": {"slots_per_trial": 0},
        "min_checkpoint_period": 7,
    }


@pytest.mark.parametrize(
    ("text", "path"),
    [("searcher: {metric: 3}", "searcher.metric"), ("searcher: 3", "searcher"), ("debug: 3", "debug")],
)
def test_map_of_a_file_must_be_a_config(text: str, path: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        read(tmp_path / "a.yaml", {"searcher": {"name": "single", "metric": "loss"}})
    assert [(problem.path, problem.line) for problem in caught.value.problems] == [(path, 1)]


def test_reading_configs_needs_no_torch() -> None:
    program = "import sys, determined.experiment.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_section_of_a_registered_store_is_passed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_base.section_types, "tape", pytest.fail)
    section = {"type": "tape", "robot": 3, "save_trial_best": 2}
    made = from_map({"searcher": {"name": "single", "metric": "loss"}, "checkpoint_storage": section})
    assert made.to_dict()["checkpoint_storage"] == section | {"save_experiment_best": 0, "save_trial_latest": 1}
    assert from_map(made.to_dict()) == made
