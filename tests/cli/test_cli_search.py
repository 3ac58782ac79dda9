"""What `det` shows of a search that has run: once for all of these, with real trials."""

from __future__ import annotations

import csv
import io
import json
import pathlib
import re
from typing import Any

import pytest
from command_lab import CLASS_CONFIG, Lab, Searched, eventually

from determined.cli._follow._view import View
from determined.cli._follow._watch import Watch
from determined.experimental import client

pytestmark = pytest.mark.timeout(240)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def best_trial(searched: Searched) -> Any:
    trials = searched.lab.records.trials(1)
    return min(trials, key=lambda trial: trial.best_validation.value if trial.best_validation else 1e9)


def test_following_from_the_start_tells_of_every_validation_and_every_end(searched: Searched) -> None:
    reports = searched.lab.records.metrics_by_trial(1, "validation")
    told = re.findall(r"trial (\d): validation_loss \S+ at step (\d+)\n", searched.output)
    assert sorted(told) == sorted((str(id), str(report.steps_completed)) for id in reports for report in reports[id])
    assert sorted(reports) == [1, 2, 3, 4]
    assert "best so far" in searched.output
    end = searched.output.index("experiment 1 COMPLETED")
    assert all(0 < searched.output.index(f"trial {number} COMPLETED") < end for number in range(1, 5))


@pytest.mark.thorough
def test_following_from_the_start_tells_what_came_before_the_first_look(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Watch.look

    def look_late(self: Watch) -> View:
        eventually(lambda: lab.state(1) == "COMPLETED")
        return look(self)

    monkeypatch.setattr(Watch, "look", look_late)
    lab.go.touch()
    output = lab.succeeds("e", "create", lab.config(), lab.code, "--follow")
    assert re.findall(r"trial 1: loss \S+ at step \d", output) == [
        "trial 1: loss 1 at step 1",
        "trial 1: loss 0.5 at step 2",
        "trial 1: loss 0.333333 at step 3",
    ]


def test_following_ends_with_the_best_trial_its_checkpoint_and_what_to_type_next(searched: Searched) -> None:
    end = searched.output[searched.output.index("best trial") :]
    best = best_trial(searched)
    found = dict(re.findall(r"^(best trial|validation_loss|checkpoint) +(\S+)", end, re.M))
    assert found["best trial"] == str(best.id)
    assert float(found["validation_loss"]) == pytest.approx(best.best_validation.value, rel=1e-5)
    checkpoint = searched.lab.records.checkpoint(found["checkpoint"])
    assert (checkpoint.trial_id, checkpoint.steps_completed) == (best.id, best.best_validation.steps_completed)
    assert "det experiment download 1" in end


def test_following_ends_with_a_table_of_all_trials_the_best_first(searched: Searched) -> None:
    table = searched.output[searched.output.index("Trials") : searched.output.index("best trial")]
    lines = [line.split() for line in table.splitlines() if "COMPLETED" in line]
    assert sorted(line[0] for line in lines) == ["1", "2", "3", "4"]
    losses = [float(line[3]) for line in lines]
    assert losses == sorted(losses)


def test_a_driven_experiment_is_listed_with_its_search(searched: Searched) -> None:
    (row,) = rows(searched.lab.succeeds("e", "list", "--csv"))
    assert (row["state"], row["search"], row["trials"]) == ("COMPLETED", "adaptive_asha", "4")


def test_a_driven_experiment_is_described_with_its_trials(searched: Searched) -> None:
    output = searched.lab.succeeds("e", "describe", 1)
    for part in ("adaptive_asha", "line:Line", "best validation", "Trials", "Checkpoints", str(searched.lab.home)):
        assert part in output


@pytest.mark.parametrize("command", [("e", "describe", 1), ("e", "describe", 1, "--json"), ("e", "list", "--json")])
def test_secrets_of_all_kinds_are_masked(searched: Searched, command: tuple[Any, ...]) -> None:
    output = searched.lab.succeeds(*command)
    assert "hunter2" not in output
    assert "30517" not in output
    assert "API_KEY=********" in output
    assert "PIN=********" in output


def test_everything_in_the_home_folder_is_for_its_owner_alone(searched: Searched) -> None:
    everything = [searched.lab.home, *searched.lab.home.rglob("*")]
    ours = [path for path in everything if "__pycache__" not in path.parts]  # Python's, in a folder of ours
    assert [str(path) for path in ours if path.stat().st_mode & 0o077] == []
    assert any("tfevents" in path.name for path in everything)


def test_values_of_environment_variables_are_in_no_file_but_the_record(searched: Searched) -> None:
    files = [file for file in searched.lab.home.rglob("*") if file.is_file()]
    assert [file.name for file in files if b"PIN=30517" in file.read_bytes()] == ["tracking.db"]
    assert b"PIN=********" in (searched.lab.home / "experiments" / "1" / "code" / "config.yaml").read_bytes()


def test_values_of_environment_variables_are_masked_for_clients(
    searched: Searched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DET_HOME", str(searched.lab.home))
    experiment = client.Determined().get_experiment(1)
    shown = ["API_KEY=********", "PIN=********"]
    assert experiment.config["environment"]["environment_variables"]["cpu"] == shown
    trained_with = experiment.top_checkpoint().training.experiment_config
    assert trained_with["environment"]["environment_variables"]["cpu"] == shown


def test_trials_are_listed_as_json_and_csv(searched: Searched) -> None:
    listed = json.loads(searched.lab.succeeds("e", "list-trials", 1, "--json"))
    assert [trial["id"] for trial in listed] == [1, 2, 3, 4]
    of_csv = rows(searched.lab.succeeds("e", "list-trials", 1, "--csv"))
    assert [json.loads(row["hparams"]) for row in of_csv] == [trial["hparams"] for trial in listed]


def test_the_best_trials_are_listed_first_on_request(searched: Searched) -> None:
    (row,) = rows(searched.lab.succeeds("e", "list-trials", 1, "--best", "--limit", 1, "--csv"))
    assert row["trial"] == str(best_trial(searched).id)


def test_checkpoints_are_listed_with_the_metric_of_their_validation(searched: Searched) -> None:
    listed = rows(searched.lab.succeeds("e", "list-checkpoints", 1, "--best", "--csv"))
    losses = [float(row["validation_loss"]) for row in listed if row["validation_loss"]]
    assert losses == sorted(losses)
    assert len(losses) > 1


def test_the_best_checkpoints_are_downloaded(searched: Searched, tmp_path: pathlib.Path) -> None:
    searched.lab.succeeds("e", "download", 1, "--top-n", 2, "-o", tmp_path / "best")
    ranked = rows(searched.lab.succeeds("e", "list-checkpoints", 1, "--best", "--csv"))[:2]
    assert {folder.name for folder in (tmp_path / "best").iterdir()} == {row["uuid"] for row in ranked}
    assert all((tmp_path / "best" / row["uuid"] / "state_dict.pth").is_file() for row in ranked)


def test_a_metric_of_which_the_best_is_unknown_cannot_choose_checkpoints(searched: Searched) -> None:
    result = searched.lab.det("e", "download", 1, "--sort-by", "batches")
    assert result.exit_code == 1
    assert "--smaller-is-better" in result.stderr


@pytest.mark.parametrize("options", [(), ("--latest",)])
def test_a_checkpoint_of_a_trial_is_downloaded(
    searched: Searched, options: tuple[str, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    searched.lab.succeeds("t", "download", 3, *options)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    of_trial = [one for one in searched.lab.records.checkpoints(1, 3) if one.state.value == "COMPLETED"]
    best = searched.lab.records.trial(3).best_validation
    assert best is not None
    step = max(one.steps_completed for one in of_trial) if options else best.steps_completed
    assert [one.uuid for one in of_trial if one.steps_completed == step] == [folder.name]


def test_logs_of_all_trials_come_in_the_order_of_time(searched: Searched) -> None:
    lines = searched.lab.succeeds("e", "logs", 1).splitlines()
    learning = [re.search(r"\[trial (\d) rank 0\] learns with", line) for line in lines]
    assert [found[1] for found in learning if found] == ["1", "2", "3", "4"]
    stamps = [line[:23] for line in lines]
    assert stamps == sorted(stamps)


def test_logs_of_one_trial_can_be_cut(searched: Searched) -> None:
    lines = searched.lab.succeeds("t", "logs", 1).splitlines()
    assert len(lines) > 3
    assert searched.lab.succeeds("t", "logs", 1, "--head", 2).splitlines() == lines[:2]
    assert searched.lab.succeeds("t", "logs", 1, "--tail", 2).splitlines() == lines[-2:]
    assert searched.lab.succeeds("t", "logs", 1, "--rank", 1) == ""


@pytest.mark.parametrize(("since", "shows"), [("1h", True), ("2000-01-01", True), ("0s", False), ("2990-01-01", False)])
def test_logs_since_a_time(searched: Searched, since: str, shows: bool) -> None:
    assert bool(searched.lab.succeeds("t", "logs", 1, "--since", since)) is shows


def test_following_logs_of_an_ended_experiment_ends(searched: Searched) -> None:
    assert searched.lab.succeeds("e", "logs", 1, "-f", "--tail", 3).count("\n") == 3
    assert searched.lab.succeeds("t", "logs", 1, "-f") == searched.lab.succeeds("t", "logs", 1)


def test_the_curves_of_all_trials_are_drawn(searched: Searched, tmp_path: pathlib.Path) -> None:
    searched.lab.succeeds("e", "plot", 1, "-o", tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    for label in ("lines, experiment 1", "validation_loss", "trial 1", "trial 4", "batches trained"):
        assert f"<!-- {label} -->" in drawn


def test_a_warm_start_can_be_tested(searched: Searched) -> None:
    options = ("--local", "--test", "--config", "searcher.source_trial_id=2")
    output = searched.lab.succeeds("e", "create", searched.lab.write(CLASS_CONFIG), searched.lab.code, *options)
    assert "The test passed" in output
    assert len(searched.lab.records.experiments()) == 1


def test_waiting_for_an_ended_experiment_returns_at_once(searched: Searched) -> None:
    assert searched.lab.succeeds("e", "wait", 1) == "Experiment 1 is COMPLETED.\n"


@pytest.mark.parametrize("command", ["pause", "activate", "cancel", "kill"])
def test_an_ended_experiment_cannot_be_controlled(searched: Searched, command: str) -> None:
    result = searched.lab.det("e", command, 1)
    assert (result.exit_code, "it has ended (COMPLETED)" in result.stderr) == (1, True)


def test_an_ended_trial_cannot_be_killed(searched: Searched) -> None:
    assert searched.lab.det("t", "kill", 1).exit_code == 1


def test_a_search_without_unfinished_trials_cannot_be_continued(searched: Searched) -> None:
    result = searched.lab.det("e", "continue", 1)
    assert (result.exit_code, "nothing to continue" in result.stderr) == (1, True)


def test_nothing_is_left_running(searched: Searched) -> None:
    assert searched.lab.processes() == []
