"""Every config that can be written reads back from its map as the same."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from determined.experiment.config import from_map

# A loaded machine is no reason to fail.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
LARGEST = 2**31 - 1
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=6)
POSITIVE = st.integers(1, LARGEST)
NATURAL = st.integers(0, LARGEST)
FINITE = st.floats(-1e100, 1e100)
FREE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**62), 2**62), FINITE, NAMES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
LENGTHS = st.one_of(
    POSITIVE,
    *(st.builds(lambda count, unit=unit: {unit: count}, POSITIVE) for unit in ("batches", "records", "epochs")),
)


def section(
    required: dict[str, Any] | None = None, **optional: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required or {}, optional={name: st.none() | one for name, one in optional.items()})


def ordered(kind: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Ranges of a kind, of which the first end is below the second."""
    pairs = st.lists(values, min_size=2, max_size=2, unique=True).map(sorted)
    return st.builds(
        lambda ends, count: {"type": kind, "minval": ends[0], "maxval": ends[1], "count": count},
        pairs,
        st.integers(1, 3),
    )


CONSTANTS = st.one_of(
    st.builds(lambda val: {"type": "const", "val": val}, FREE), FREE.filter(lambda v: not isinstance(v, dict))
)
LEAVES = st.one_of(
    CONSTANTS,
    ordered("int", st.integers(-(2**40), 2**40)),
    ordered("double", FINITE),
    ordered("log", st.integers(-30, 30)),
    st.builds(lambda vals: {"type": "categorical", "vals": vals}, st.lists(FREE, min_size=1, max_size=3)),
)
SPACES = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=4),
    lambda inner: st.dictionaries(NAMES, LEAVES | inner, max_size=3),
    max_leaves=6,
)
COMMON = {"smaller_is_better": st.booleans(), "max_length": LENGTHS}
RUNGS = st.integers(1, 20)
TIMED = {"metric": NAMES, "max_trials": POSITIVE, "time_metric": NAMES, "max_time": POSITIVE}


def searcher(
    name: str, required: dict[str, Any], **optional: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    return section({"name": st.just(name)} | required, **COMMON, **optional)


SEARCHERS = st.one_of(
    searcher("single", {"metric": NAMES}, source_trial_id=POSITIVE),
    searcher("random", {"metric": NAMES, "max_trials": POSITIVE}, source_checkpoint_uuid=NAMES),
    searcher("grid", {"metric": NAMES}, max_concurrent_trials=NATURAL),
    searcher("async_halving", TIMED | {"num_rungs": RUNGS}, divisor=st.floats(1.5, 9)),
    searcher(
        "adaptive_asha",
        TIMED,
        mode=st.sampled_from(["standard", "conservative", "aggressive"]),
        bracket_rungs=st.lists(RUNGS, max_size=3),
        max_rungs=RUNGS,
    ),
    searcher("tpe", {"metric": NAMES, "max_trials": POSITIVE}, n_startup_trials=NATURAL),
    searcher("gp", {"metric": NAMES, "max_trials": POSITIVE}, max_concurrent_trials=NATURAL),
    searcher("custom", {"metric": NAMES, "method": st.just("a.b:C")}, options=st.dictionaries(NAMES, FREE, max_size=2)),
)
RETENTION = dict.fromkeys(("save_experiment_best", "save_trial_best", "save_trial_latest"), NATURAL)
STORAGES = st.one_of(
    section(**RETENTION),
    section({"type": st.just("shared_fs"), "host_path": st.just("/a")}, storage_path=st.just("b"), **RETENTION),
    section({"type": st.just("directory"), "container_path": st.just("/a")}, **RETENTION),
    section({"type": st.just("gcs"), "bucket": NAMES}, **RETENTION),
    section({"type": st.just("s3"), "bucket": NAMES, "access_key": NAMES, "secret_key": NAMES}),
    section({"type": st.just("azure"), "container": NAMES, "connection_string": NAMES}),
)
FLAG_OR_MAP = st.booleans() | st.dictionaries(NAMES, FREE, max_size=2)
CONFIGS = section(
    {"searcher": SEARCHERS},
    name=NAMES,
    description=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9),
    labels=st.lists(NAMES, max_size=3),
    entrypoint=st.one_of(st.just("python3 train.py"), st.lists(NAMES, min_size=1, max_size=3)),
    hyperparameters=SPACES,
    resources=section(slots_per_trial=NATURAL, priority=st.integers(1, 99), weight=FREE),
    max_restarts=NATURAL,
    min_validation_period=LENGTHS,
    min_checkpoint_period=LENGTHS,
    checkpoint_policy=st.sampled_from(["best", "all", "none"]),
    checkpoint_storage=STORAGES,
    records_per_epoch=NATURAL,
    optimizations=section(
        aggregation_frequency=POSITIVE,
        mixed_precision=st.sampled_from(["bf16", "O1"]),
        compile=FLAG_OR_MAP,
        cuda_graphs=FLAG_OR_MAP,
        fused_optimizer=st.booleans(),
        tf32=st.booleans(),
    ),
    profiling=section(enabled=st.booleans(), begin_on_batch=NATURAL),
    reproducibility=section(experiment_seed=st.integers(0, 2**32 - 1)),
    data=st.dictionaries(NAMES, FREE, max_size=3),
    environment=section(environment_variables=st.sampled_from([[], ["A=b"], {"cpu": ["A=b"]}]), image=FREE),
    log_policies=st.lists(section({"pattern": st.just("a+")}, name=NAMES, action=st.just("exclude_node")), max_size=2),
    retention_policy=section(log_retention_days=st.integers(-1, 32767)),
    debug=st.booleans(),
    pbs=FREE,
    slurm=section(slots_per_node=POSITIVE, gpu_type=NAMES, sbatch_args=st.just(["--exclusive"])),
)


@given(CONFIGS)
@unhurried
def test_config_reads_back_from_its_map_as_the_same(written: dict[str, Any]) -> None:
    made = from_map(written)
    stored = json.dumps(made.to_dict(), allow_nan=False)
    again = from_map(json.loads(stored))
    assert again == made
    assert json.dumps(again.to_dict()) == stored


@given(CONFIGS)
@unhurried
def test_what_was_written_is_in_the_map(written: dict[str, Any]) -> None:
    filled = from_map(written).to_dict()
    for name in ("name", "labels", "max_restarts", "checkpoint_policy", "data", "debug"):
        if written.get(name) is not None:
            assert filled[name] == written[name]
    for name, value in written["searcher"].items():
        if value is not None:
            assert filled["searcher"][name] == value
