"""A trial class trained as an experiment config says, in this process."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest

from determined.experiment.config import from_map
from determined.launch._harness import train
from trials import records, saved_at, steps_of

MODULE = """
from trials import LineTrial

class Trial(LineTrial):
    made = []

    def __init__(self, context):
        super().__init__(context)
        Trial.made.append(context)

not_a_trial = dict
"""
CONFIG: dict[str, Any] = {
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 9}},
    "hyperparameters": {"lr": 0.1, "global_batch_size": 4},
}


@pytest.fixture
def contexts(project: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the module and returns a function that trains with changes to the config and returns the contexts."""
    (project / "model_def.py").write_text(MODULE)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    monkeypatch.delitem(sys.modules, "model_def", raising=False)

    def run(entrypoint: str = "model_def:Trial", **changes: Any) -> list[Any]:
        (project / "experiment.json").write_text(json.dumps(CONFIG | changes))
        train(entrypoint, "experiment.json")
        return list(sys.modules["model_def"].Trial.made)

    yield run
    sys.modules.pop("model_def", None)


def test_periods_policy_and_length_are_those_of_the_config(contexts: Any) -> None:
    contexts(
        min_validation_period={"batches": 2},
        min_checkpoint_period={"records": 16},
        scheduling_unit=3,
        checkpoint_policy="none",
        perform_initial_validation=True,
    )
    assert steps_of("validation") == [0, 2, 4, 6, 8, 9]
    assert steps_of("training") == [2, 3, 4, 6, 8, 9]
    assert saved_at() == [4, 8, 9]


def test_nothing_but_a_length_is_needed(contexts: Any) -> None:
    contexts(min_validation_period={"batches": 0}, min_checkpoint_period=None)
    assert steps_of("validation") == [9]
    assert saved_at() == [9]


def test_epochs_count_as_length(contexts: Any) -> None:
    contexts(searcher={"name": "single", "metric": "validation_loss", "max_length": {"epochs": 2}})
    assert steps_of("validation") == [12]


def test_time_of_an_adaptive_search_counts_as_length(contexts: Any) -> None:
    contexts(
        searcher={"name": "adaptive_asha", "metric": "epochs", "time_metric": "batches", "max_time": 5, "max_trials": 1}
    )
    assert steps_of("training") == [5]


def test_hyperparameters_seed_and_aggregation_reach_the_trial(contexts: Any) -> None:
    nested = {"lr": {"type": "const", "val": 0.5}, "net": {"width": 8, "act": {"type": "const", "val": "relu"}}}
    (context,) = contexts(
        hyperparameters=nested,
        optimizations={"aggregation_frequency": 3},
        reproducibility={"experiment_seed": 77},
    )
    assert context.get_hparams() == {"lr": 0.5, "net": {"width": 8, "act": "relu"}}
    assert context.get_trial_seed() == 77
    assert context.aggregation_frequency == 3


def test_run_is_named_after_the_program_unless_the_config_names_it(contexts: Any) -> None:
    contexts()
    contexts(name="mine")
    assert {experiment.name for experiment in records().experiments()} == {"project/model_def", "mine"}


def test_managed_run_takes_everything_from_its_runner(
    contexts: Any, project: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts()  # whose trial and checkpoint the managed run goes on with
    (checkpoint,) = records().checkpoints()
    variables = {
        "DET_TRIAL_ID": "1",
        "DET_EXPERIMENT_ID": "1",
        "DET_TRIAL_SEED": "5",
        "DET_HPARAMS": json.dumps({"lr": 0.25}),
        "DET_EXPERIMENT_CONFIG": json.dumps(
            CONFIG | {"searcher": CONFIG["searcher"] | {"max_length": {"batches": 11}}}
        ),
        "DET_LATEST_CHECKPOINT": checkpoint.uuid,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    train("model_def:Trial")
    context = sys.modules["model_def"].Trial.made[-1]
    assert context.get_hparams() == {"lr": 0.25}
    assert steps_of("training")[-1] == 11
    with pytest.raises(ValueError, match="leave --config out"):
        train("model_def:Trial", "experiment.json")


def test_managed_run_understands_a_config_with_every_default_filled_in(
    contexts: Any, project: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts()  # whose trial the managed run goes on with
    searcher = CONFIG["searcher"] | {"max_length": {"records": 48}}
    filled = from_map(CONFIG | {"searcher": searcher, "checkpoint_policy": "none"}).to_dict()
    variables = {
        "DET_TRIAL_ID": "1",
        "DET_EXPERIMENT_ID": "1",
        "DET_TRIAL_SEED": "5",
        "DET_HPARAMS": json.dumps({"lr": 0.25, "global_batch_size": 4}),
        "DET_EXPERIMENT_CONFIG": json.dumps(filled),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    train("model_def:Trial")
    assert steps_of("training")[-1] == 12
    assert sys.modules["model_def"].Trial.made[-1].get_experiment_config() == filled


@pytest.mark.parametrize(
    ("entrypoint", "error", "said"),
    [
        ("modle_def:Trial", ModuleNotFoundError, "there is no module 'modle_def' in "),
        ("model_def:Trail", AttributeError, "there is no 'Trail'; trial classes there: Trial."),
        ("model_def:not_a_trial", TypeError, "is not a subclass of pytorch.PyTorchTrial"),
    ],
)
def test_class_that_is_not_there_is_named(entrypoint: str, error: type[Exception], said: str, contexts: Any) -> None:
    with pytest.raises(error, match=said):
        contexts(entrypoint)


def test_missing_library_of_the_module_is_what_is_missing(contexts: Any, project: pathlib.Path) -> None:
    (project / "model_def.py").write_text("import no_such_library")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library'"):
        contexts()


def test_yaml_numbers_and_dates_are_what_people_mean(contexts: Any, project: pathlib.Path) -> None:
    (project / "experiment.yaml").write_text(
        "searcher: {max_length: {batches: 1}}\nhyperparameters: {lr: 1e-3, big: -2E5, day: 2024-05-06, text: 1e3x}"
    )
    train("model_def:Trial", "experiment.yaml")
    (context,) = sys.modules["model_def"].Trial.made
    assert context.get_hparams() == {"lr": 0.001, "big": -2e5, "day": "2024-05-06", "text": "1e3x"}
