"""`det experiment create`: what is refused, what is said, and the test before a long run."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tarfile
from typing import Any

import pytest
from command_lab import CLASS_CONFIG, Lab

import forking

pytestmark = pytest.mark.timeout(240)

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def test_an_experiment_is_created_paused_over_a_copy_of_the_program(lab: Lab) -> None:
    output = lab.succeeds("e", "create", lab.config(), lab.code, "--paused")
    assert "Created experiment 1, scripts (single)." in output
    assert "det experiment activate 1" in output
    assert lab.state(1) == "PAUSED"
    copied = lab.home / "experiments" / "1" / "code" / "train.py"
    assert copied.read_text() == (lab.code / "train.py").read_text()


def test_a_program_is_downloaded_with_what_was_included(lab: Lab) -> None:
    (lab.folder / "extra.txt").write_text("more")
    lab.succeeds("e", "create", lab.config(), lab.code, "-i", lab.folder / "extra.txt", "--paused")
    lab.succeeds("e", "download-model-def", 1, "--output-dir", lab.folder / "out")
    with tarfile.open(lab.folder / "out" / "experiment_1_model_def.tgz") as archive:
        assert {"./train.py", "./extra.txt"} <= set(archive.getnames())


def test_values_of_the_config_are_replaced_by_options(lab: Lab) -> None:
    options = ("--config", "name=other", "--config", "hyperparameters.x=7", "--config", "searcher.metric=accuracy")
    lab.succeeds("e", "create", lab.config(), lab.code, "--paused", *options)
    record = lab.records.experiment(1)
    assert record.name == "other"
    assert record.config is not None
    assert record.config["searcher"]["metric"] == "accuracy"
    assert record.config["hyperparameters"]["x"]["val"] == 7


def test_all_problems_of_a_config_are_listed_with_their_lines(lab: Lab) -> None:
    path = lab.folder / "bad.yaml"
    path.write_text("name: 3\nsearcher: {name: randm, metric: loss}\nresorces: {}\n")
    result = lab.det("e", "create", path, lab.code)
    assert (result.exit_code, result.stdout) == (1, "")
    first, *problems = result.stderr.splitlines()
    assert first.startswith("Error: ")
    assert [problem.split(":")[0].strip() for problem in problems] == ["line 1", "line 2", "line 3"]
    assert "Did you mean random?" in result.stderr


def test_what_should_be_known_about_a_config_is_a_warning(lab: Lab) -> None:
    result = lab.det("e", "create", lab.config(bind_mounts=[{"host_path": "/a"}]), lab.code, "--paused")
    assert result.exit_code == 0
    assert result.stderr.startswith("Warning: ")
    assert "bind_mounts" in result.stderr


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"entrypoint": None}, "entrypoint"),
        ({"searcher": {"name": "custom", "metric": "loss", "method": "absent:Method"}}, "absent"),
        ({"searcher": {"name": "single", "metric": "loss", "source_trial_id": 7}}, "7"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(lab: Lab, changes: dict[str, Any], says: str) -> None:
    result = lab.det("e", "create", lab.config(**changes), lab.code)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert says in result.stderr
    assert lab.records.experiments() == []


@pytest.mark.parametrize("missing", ["config", "folder"])
def test_a_path_that_is_not_there_is_refused_in_one_line(lab: Lab, missing: str) -> None:
    paths = {"config": lab.config(), "folder": lab.code} | {missing: lab.folder / "absent"}
    result = lab.det("e", "create", paths["config"], paths["folder"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "absent" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("config.yaml",),
        ("config.yaml", ".", "--local"),
        ("config.yaml", ".", "--test"),
        ("config.yaml", ".", "--paused", "--follow"),
        ("config.yaml", ".", "--resume", 1),
        ("--resume", 1, "--paused"),
        ("config.yaml", ".", "--slots", 0),
        ("config.yaml", ".", "--unknown"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(lab: Lab, options: tuple[Any, ...]) -> None:
    result = lab.det("e", "create", *options)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("e", "logs", 1, "--head", 1, "--tail", 1),
        ("e", "logs", 1, "--head", 1, "-f"),
        ("e", "logs", 1, "--since", "yesterday"),
        ("e", "activate", 1, 2, "--follow"),
        ("e", "set", "priority", 1, "100"),
        ("e", "set", "max-slots", 1, "many"),
        ("e", "set", "max-slots", 1, "0"),
        ("e", "set", "name", 1, " "),
        ("e", "set", "project", 1, "a", ""),
        ("e", "pause", "one"),
        ("tensorboard", "start"),
        ("m", "create", "a", "--metadata", "no-equals-sign"),
    ],
)
def test_arguments_that_make_no_sense_are_usage_errors(lab: Lab, arguments: tuple[Any, ...]) -> None:
    result = lab.det(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ("e", verb, 99)
            for verb in ("pause", "activate", "cancel", "kill", "wait", "continue", "archive", "unarchive")
        ),
        *(("e", verb, 99) for verb in ("describe", "logs", "list-trials", "list-checkpoints", "download", "plot")),
        ("e", "create", "--resume", 99),
        ("e", "delete", 99),
        ("e", "label", "add", 99, "x"),
        ("e", "set", "name", 99, "x"),
        ("e", "set", "priority", 99, "5"),
        *(("t", verb, 99) for verb in ("describe", "logs", "download", "kill")),
        *(("c", verb, "feedbeef") for verb in ("describe", "download", "delete")),
        ("m", "describe", "absent"),
        ("m", "list-versions", "absent"),
        ("m", "register-version", "absent", "feedbeef"),
        ("tensorboard", "start", 99),
        ("preview-search", "absent.yaml"),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_what_is_not_there_is_one_line_on_stderr_and_status_1(lab: Lab, arguments: tuple[Any, ...]) -> None:
    lab.create("--paused")  # so that there is a database
    result = lab.det(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_the_run_of_a_script_cannot_be_controlled(det: Any, finished: Any) -> None:
    for arguments in (("e", "pause", 1), ("e", "logs", 1), ("t", "kill", 1), ("e", "wait", 1)):
        result = det(*arguments)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert "run of a script" in result.stderr


def test_a_trial_class_is_tested_by_one_batch_and_nothing_is_recorded(lab: Lab) -> None:
    output = lab.succeeds("e", "create", lab.write(CLASS_CONFIG), lab.code, "--local", "--test")
    assert "Training one batch of line:Line in this process" in output
    assert "learns with" in output
    reports = [line.split(": ", 1) for line in output.splitlines() if line.startswith(("training: ", "validation: "))]
    assert [(group, json.loads(metrics)["batches"]) for group, metrics in reports] == [
        ("training", 1),
        ("validation", 1),
    ]
    assert "The test passed" in output
    assert lab.records.experiments() == []


def test_the_test_runs_on_one_slot_whatever_the_config_says(lab: Lab) -> None:
    slots = {"resources": {"slots_per_trial": 64}, "hyperparameters": {"lr": 0.1, "global_batch_size": 64}}
    output = lab.succeeds("e", "create", lab.write(CLASS_CONFIG | slots), lab.code, "--local", "--test")
    assert "The test runs on one slot; resources.slots_per_trial: 64 is ignored." in output
    assert "The test passed" in output


def test_a_program_that_needs_more_than_one_batch_hears_that_the_test_has_one(lab: Lab) -> None:
    needy = "    def evaluate_batch(self, batch, batch_idx):\n        assert batch_idx > 0, 'no first batch'\n"
    (lab.code / "line.py").write_text(
        (lab.code / "line.py").read_text().replace("    def evaluate_batch(self, batch, batch_idx):\n", needy)
    )
    result = lab.det("e", "create", lab.write(CLASS_CONFIG), lab.code, "--local", "--test")
    assert result.exit_code == 1
    assert "code that needs more than one batch fails here" in result.stderr
    assert result.stderr.splitlines()[-1] == "Error: the test failed: AssertionError: no first batch"


def test_the_test_leaves_the_checkpoint_storage_alone(lab: Lab) -> None:
    storage = {"checkpoint_storage": {"type": "directory", "container_path": str(lab.folder / "store")}}
    lab.succeeds("e", "create", lab.write(CLASS_CONFIG | storage), lab.code, "--local", "--test")
    assert list((lab.folder / "store").iterdir()) == []


def test_a_trial_class_that_fails_its_test_has_status_1(lab: Lab) -> None:
    (lab.code / "line.py").write_text((lab.code / "line.py").read_text().replace("self.loss(batch)", "self.los(batch)"))
    result = lab.det("e", "create", lab.write(CLASS_CONFIG), lab.code, "--local", "--test")
    assert result.exit_code == 1
    assert "Error: the test failed: AttributeError: " in result.stderr


def test_a_package_that_determined_brought_along_is_named_with_its_command(lab: Lab) -> None:
    (lab.code / "line.py").write_text(f"import boto3.no_such\n{(lab.code / 'line.py').read_text()}")
    result = lab.det("e", "create", lab.write(CLASS_CONFIG), lab.code, "--local", "--test")
    assert "Error: the test failed: ModuleNotFoundError: No module named 'boto3" in result.stderr
    assert "pip install 'resolute[determined]'" in result.stderr


def test_an_error_of_several_lines_is_told_in_lines(lab: Lab) -> None:
    program = (lab.code / "line.py").read_text()
    (lab.code / "line.py").write_text(program.replace("self.context = context", "raise ValueError('two:\\n  one\\n')"))
    result = lab.det("e", "create", lab.write(CLASS_CONFIG), lab.code, "--local", "--test")
    assert result.stderr.endswith("Error: the test failed: ValueError: two:\n  one\n")


def test_a_module_that_is_not_in_the_copy_fails_the_test(lab: Lab) -> None:
    (lab.code / ".detignore").write_text("line.py\n")
    result = lab.det("e", "create", lab.write(CLASS_CONFIG), lab.code, "--local", "--test")
    assert (result.exit_code, "there is no module 'line'" in result.stderr) == (1, True)


def run(lab: Lab, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `det` as a process of its own, whose output is what its children write too."""
    command = ["-m", "determined.cli", *map(str, arguments)]
    return forking.run(command, env={**os.environ, "DET_HOME": str(lab.home)}, capture_output=True, timeout=200)


def test_a_script_is_tested_as_it_is(lab: Lab) -> None:
    lab.go.touch()
    result = run(lab, "e", "create", lab.config(), lab.code, "--local", "--test")
    assert (result.returncode, result.stderr) == (0, "")
    assert "step 3 with x = 1.0" in result.stdout
    assert 'validation: {"loss": 0.5, "epochs": 2}' in result.stdout
    assert lab.records.experiments() == []


@pytest.mark.parametrize(("entrypoint", "says"), [(["./absent"], "./absent"), ("exit 3", "status 3")])
def test_a_script_that_fails_its_test_has_status_1(lab: Lab, entrypoint: Any, says: str) -> None:
    result = lab.det("e", "create", lab.config(entrypoint=entrypoint), lab.code, "--local", "--test")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert says in result.stderr


def test_a_startup_hook_that_fails_in_a_test_is_named(lab: Lab) -> None:
    (lab.code / "startup-hook.sh").write_text("exit 3\n")
    result = lab.det("e", "create", lab.config(), lab.code, "--local", "--test")
    assert (result.exit_code, "the test failed: startup-hook.sh exited with status 3" in result.stderr) == (1, True)


@pytest.mark.thorough
def test_trainings_of_scripts_are_one_batch_in_a_test(lab: Lab) -> None:
    (lab.code / "train.py").write_text(
        "from determined import pytorch\n"
        "from line import Line\n"
        "with pytorch.init() as context:\n"
        "    pytorch.Trainer(Line(context), context).fit(max_length=pytorch.Epoch(1000))\n"
    )
    settings = {"searcher": {"name": "single", "metric": "validation_loss"}, "environment": CLASS_CONFIG["environment"]}
    path = lab.config(hyperparameters={"lr": 0.1}, **settings)
    result = run(lab, "e", "create", path, lab.code, "--local", "--test")
    assert (result.returncode, "batch 1/1" in result.stdout) == (0, True), result.stderr


def test_the_search_of_the_digits_example_can_run(lab: Lab) -> None:
    folder = EXAMPLES / "digits"
    assert "The test passed" in lab.succeeds("e", "create", folder / "adaptive.yaml", folder, "--local", "--test")


def test_a_search_is_previewed(lab: Lab) -> None:
    path = lab.write(CLASS_CONFIG)
    output = lab.succeeds("preview-search", path)
    assert "4 trials" in output
    assert "All trials together train for" in output
    shown = json.loads(lab.succeeds("preview-search", path, "--json"))
    assert (shown["trials"], shown["unit"]) == (4, "epochs")
    lines = lab.succeeds("preview-search", path, "--csv", "--config", "searcher.max_trials=8").splitlines()
    assert lines[0] == "bracket,rung,arrive,go on,end,epochs"
    assert not lab.home.exists()
