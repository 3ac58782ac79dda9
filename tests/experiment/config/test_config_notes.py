"""Old forms that are translated, keys without effect, and what else people are told."""

from __future__ import annotations

from typing import Any

import pytest

from determined.experiment.config import (
    AdaptiveAshaSearcher,
    AsyncHalvingSearcher,
    ExperimentConfig,
    Length,
    from_map,
    parse,
)

SINGLE = {"name": "single", "metric": "loss"}
ASHA = {"name": "adaptive_asha", "metric": "loss", "max_trials": 9}
RANGE = {"type": "double", "minval": 0, "maxval": 1}


def config(**keys: Any) -> ExperimentConfig:
    return from_map({"searcher": SINGLE} | keys)


def test_there_is_nothing_to_say_about_most_configs() -> None:
    asha = ASHA | {"time_metric": "epochs", "max_time": 9}
    made = config(searcher=asha, entrypoint="m:T", min_validation_period={"epochs": 1}, hyperparameters={"a": RANGE})
    assert made.notes == ()


@pytest.mark.parametrize(
    ("old", "time_metric", "max_time"),
    [
        (12, "batches", 12),
        ({"batches": 12}, "batches", 12),
        ({"epochs": 12}, "epochs", 12),
        ({"records": 70}, "batches", 8),
        ({"records": 7}, "batches", 1),
    ],
)
@pytest.mark.parametrize("size", [8, {"type": "const", "val": 8}])
def test_length_of_a_rung_based_search_becomes_its_time(old: Any, time_metric: str, max_time: int, size: Any) -> None:
    made = config(searcher=ASHA | {"max_length": old}, hyperparameters={"global_batch_size": size, "a": RANGE})
    assert isinstance(made.searcher, AdaptiveAshaSearcher)
    assert (made.searcher.time_metric, made.searcher.max_time) == (time_metric, max_time)
    (note,) = made.notes
    assert note.endswith(f"is an old form; it was read as time_metric: {time_metric}, max_time: {max_time}.")


@pytest.mark.parametrize("old", [12, {"batches": 12}, {"epochs": 12}, {"records": 16}])
@pytest.mark.parametrize("name", ["adaptive_asha", "random"])
def test_program_reads_the_length_as_it_is_written(name: str, old: Any) -> None:
    searcher = {"name": name, "metric": "loss", "max_trials": 4, "max_length": old}
    made = config(searcher=searcher, hyperparameters={"global_batch_size": 8})
    assert from_map(made.to_dict()).to_dict()["searcher"]["max_length"] == old


def test_async_halving_has_the_old_form_too() -> None:
    made = config(searcher=ASHA | {"name": "async_halving", "num_rungs": 2, "max_length": {"epochs": 4}})
    assert isinstance(made.searcher, AsyncHalvingSearcher)
    assert (made.searcher.time_metric, made.searcher.max_time) == ("epochs", 4)


def test_length_beside_a_time_is_how_long_trials_train() -> None:
    made = config(searcher=ASHA | {"time_metric": "tokens", "max_time": 9, "max_length": 5}, entrypoint="m:T")
    assert made.searcher.max_length == Length(batches=5)


@pytest.mark.parametrize("name", ["single", "random", "grid", "tpe", "gp"])
def test_length_of_other_searches_stays(name: str) -> None:
    trials = {} if name in ("single", "grid") else {"max_trials": 2}
    made = config(searcher={"name": name, "metric": "loss", "max_length": {"records": 9}} | trials)
    assert made.searcher.max_length == Length(records=9)


@pytest.mark.parametrize("name", ["min_validation_period", "min_checkpoint_period"])
def test_bare_number_counts_batches(name: str) -> None:
    assert getattr(config(**{name: 7}), name) == Length(batches=7)


def test_no_slots_becomes_one() -> None:
    made = config(resources={"slots_per_trial": 0})
    assert made.resources.slots_per_trial == 1
    assert made.notes == (
        "resources.slots_per_trial: 0 is an old form; it was read as 1, since a CPU counts as slots here.",
    )


def test_action_of_a_log_policy_may_be_a_map() -> None:
    made = config(log_policies=[{"pattern": "a", "action": {"type": "cancel_retries"}}])
    assert made.log_policies[0].action == "cancel_retries"


def test_log_policy_with_a_name_only_is_said_to_have_no_effect() -> None:
    assert config(log_policies=[{"name": "CUDA OOM"}]).notes == (
        "These keys have no effect here: log_policies[0].name.",
    )


def test_variables_for_gpus_are_those_for_cuda() -> None:
    made = config(environment={"environment_variables": {"gpu": ["A=1"], "cpu": ["A=2"]}})
    assert made.environment.variables("cuda") == {"A": "1"}


def test_keys_without_effect_are_listed_in_one_note() -> None:
    text = """
    bind_mounts: [{host_path: /a, container_path: /b}]
    environment: {image: {cpu: some/image}, force_pull_image: false, pod_spec: {a: b}}
    resources: {weight: 2, resource_pool: null, shm_size: 4 GiB, slots_per_trial: 1}
    optimizations: {tensor_fusion_threshold: 64}
    checkpoint_storage: {type: shared_fs, host_path: /a, propagation: rprivate}
    log_policies: [{pattern: a, action: cancel_retries}, {pattern: b, action: exclude_node}]
    searcher: {name: single, metric: loss}
    pbs: {}
    """
    assert parse(text).notes == (
        "These keys have no effect here: resources.weight, resources.shm_size, checkpoint_storage.propagation, "
        "optimizations.tensor_fusion_threshold, environment.image, environment.pod_spec, log_policies[1].action, "
        "bind_mounts, pbs.",
    )


def test_keys_without_effect_are_kept_for_programs_that_read_them() -> None:
    assert config(pbs={"a": [1]}).to_dict()["pbs"] == {"a": [1]}


def test_records_per_epoch_is_said_once_to_have_no_effect() -> None:
    (note,) = config(records_per_epoch=60000).notes
    assert "records_per_epoch: 60000 has no effect" in note


def test_scripts_are_told_what_acts_on_classes_only() -> None:
    changed = {
        "entrypoint": "python3 train.py",
        "scheduling_unit": 7,
        "profiling": {"enabled": True},
        "checkpoint_policy": "best",
    }
    (note,) = config(**changed).notes
    assert "module:Class: profiling, scheduling_unit." in note
    assert config(**changed | {"entrypoint": None}).notes == ()


def test_search_without_a_range_is_said_to_repeat_itself() -> None:
    random = {"name": "random", "metric": "loss", "max_trials": 3}
    (note,) = config(searcher=random, hyperparameters={"a": 1, "b": {"c": 2}}).notes
    assert "same hyperparameters" in note
    assert config(searcher=random, hyperparameters={"a": 1, "b": {"c": RANGE}}).notes == ()


def test_rung_based_search_without_validations_on_the_way_is_said_to_be_blind() -> None:
    asha = ASHA | {"time_metric": "epochs", "max_time": 9}
    (note,) = config(searcher=asha, entrypoint="m:T", hyperparameters={"a": RANGE}).notes
    assert "write min_validation_period: {epochs: 1}" in note


def test_notes_change_nothing_about_equality() -> None:
    old = config(name="a", searcher=ASHA | {"max_length": 9}, reproducibility={"experiment_seed": 1})
    again = from_map(old.to_dict())
    assert old == again
    assert len(old.notes) == len(again.notes) + 1
