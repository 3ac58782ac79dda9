"""What a runner tells a trial process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import determined as det
from determined import errors

# What an environment variable can hold.
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10)
numbers = st.integers(0, 2**31)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
maps = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
trials = st.builds(
    det.TrialInfo,
    trial_id=numbers,
    experiment_id=numbers,
    trial_seed=numbers,
    hparams=maps,
    _config=maps,
    _steps_completed=numbers,
    _trial_run_id=numbers,
)
infos = st.builds(
    det.ClusterInfo,
    trial=trials,
    latest_checkpoint=st.none() | words.filter(bool),
    task_type=words.filter(bool),
    task_id=words,
    allocation_id=words,
    slot_ids=st.lists(numbers, max_size=3),
    gpu_uuids=st.lists(words, max_size=3),
    container_addrs=st.lists(words, max_size=3),
    container_rank=numbers,
    container_slot_counts=st.lists(numbers, max_size=3),
    master_url=words,
    cluster_id=words,
    agent_id=words,
)

MANAGED = {"DET_TRIAL_ID": "3", "DET_EXPERIMENT_ID": "2", "DET_TRIAL_SEED": "1"}


@given(infos)
def test_environment_rebuilds_the_info(info: det.ClusterInfo) -> None:
    assert det.ClusterInfo.from_environment(info.to_environment()) == info


@given(infos)
def test_environment_is_made_of_strings(info: det.ClusterInfo) -> None:
    variables = info.to_environment()
    assert all(name.startswith("DET_") and isinstance(value, str) for name, value in variables.items())


def test_local_run_has_no_info() -> None:
    assert det.get_cluster_info() is None


def test_empty_trial_id_means_a_local_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_TRIAL_ID", "")
    assert det.get_cluster_info() is None


def set_environment(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in {**MANAGED, **changes}.items():
        monkeypatch.setenv(name, value)


def test_managed_run_has_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch)
    info = det.get_cluster_info()
    assert info is not None
    assert (info.trial.trial_id, info.trial.experiment_id, info.trial.trial_seed) == (3, 2, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "latest_checkpoint": None,
        "task_type": "TRIAL",
        "task_id": "",
        "allocation_id": "",
        "slot_ids": [],
        "gpu_uuids": [],
        "container_addrs": ["127.0.0.1"],
        "container_rank": 0,
        "container_slot_counts": [1],
        "master_url": "",
        "cluster_id": "",
        "agent_id": "",
        "user_data": {},
    }.items(),
)
def test_what_the_runner_leaves_out_has_a_default(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch)
    assert getattr(det.get_cluster_info(), name) == value


def test_chief_address_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, DET_CHIEF_IP="10.0.0.1", DET_SLOT_IDS="[0, 1]")
    info = det.get_cluster_info()
    assert info is not None
    assert (info.container_addrs, info.container_slot_counts) == (["10.0.0.1"], [2])


@pytest.mark.parametrize("missing", ["DET_EXPERIMENT_ID", "DET_TRIAL_SEED"])
def test_missing_variable_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch)
    monkeypatch.delenv(missing)
    with pytest.raises(errors.InternalException, match=rf"no {missing}.*Unset DET_TRIAL_ID"):
        det.get_cluster_info()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DET_TRIAL_ID", "three"),
        ("DET_EXPERIMENT_ID", "1.5"),
        ("DET_STEPS_COMPLETED", "x"),
        ("DET_CONTAINER_RANK", "x"),
        ("DET_HPARAMS", "{"),
        ("DET_HPARAMS", "[1]"),
        ("DET_EXPERIMENT_CONFIG", "5"),
        ("DET_SLOT_IDS", "5"),
        ("DET_SLOT_IDS", '["a"]'),
        ("DET_CONTAINER_ADDRS", "[1]"),
    ],
)
def test_bad_variable_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, **{name: value})
    with pytest.raises(errors.InternalException, match=f"{name}="):
        det.get_cluster_info()


def test_user_data_is_the_data_section_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, DET_EXPERIMENT_CONFIG='{"data": {"path": "/data"}}')
    info = det.get_cluster_info()
    assert info is not None
    assert info.user_data == {"path": "/data"}


def test_info_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch)
    info = det.get_cluster_info()
    assert info is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.task_id = "other"  # type: ignore[misc]
