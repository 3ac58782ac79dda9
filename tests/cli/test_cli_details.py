"""What people add to experiments and checkpoints, and what they delete. Nothing runs here."""

from __future__ import annotations

import json
import pathlib
import resource
from collections.abc import Callable
from typing import Any

import pytest
from command_lab import Lab

from determined import tracking

Det = Callable[..., Any]


def test_an_archived_experiment_is_hidden_until_it_is_asked_for(det: Det, finished: Any) -> None:
    assert det("e", "archive", 1).exit_code == 0
    assert json.loads(det("e", "list", "--json").stdout) == []
    assert "archived" in det("e", "list", "--all").stdout
    det("e", "unarchive", 1)
    assert [one["id"] for one in json.loads(det("e", "list", "--json").stdout)] == [1]


def test_labels_come_and_go(det: Det, finished: Any) -> None:
    for label in ("baseline", "[red]"):
        assert det("e", "label", "add", 1, label).exit_code == 0
    assert "baseline, [red]" in det("e", "list").stdout
    assert det("e", "label", "remove", 1, "baseline").exit_code == 0
    assert json.loads(det("e", "describe", 1, "--json").stdout)["labels"] == ["[red]"]
    result = det("e", "label", "remove", 1, "baseline")
    assert (result.exit_code, "has no label" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("what", "values", "field", "shown"),
    [
        ("name", ["other"], "name", "other"),
        ("description", ["with dropout"], "description", "with dropout"),
        ("description", [""], "description", None),
        ("notes", ["too noisy"], "notes", "too noisy"),
        ("project", ["vision", "digits"], "project", "digits"),
    ],
)
def test_details_are_set(det: Det, finished: Any, what: str, values: list[str], field: str, shown: str | None) -> None:
    assert det("e", "set", what, 1, *values).exit_code == 0
    assert json.loads(det("e", "describe", 1, "--json").stdout)[field] == shown


@pytest.mark.parametrize(
    ("what", "value", "field", "stored"),
    [
        ("max-slots", "3", "max_slots", 3),
        ("max-slots", "none", "max_slots", None),
        ("priority", "7", "priority", 7),
        ("priority", "None", "priority", None),
    ],
)
def test_limits_are_set(lab: Lab, what: str, value: str, field: str, stored: int | None) -> None:
    id = lab.create("--paused", resources={"max_slots": 1, "priority": 1})
    lab.succeeds("e", "set", what, id, value)
    assert getattr(lab.records.experiment(id), field) == stored


def test_a_limit_below_the_slots_of_one_trial_is_refused(lab: Lab) -> None:
    id = lab.create("--paused", "--slots", 2, resources={"slots_per_trial": 2})
    refused = lab.det("e", "set", "max-slots", id, 1)
    assert refused.exit_code == 1
    assert "max_slots=1" in refused.stderr
    assert "slots_per_trial=2" in refused.stderr
    assert lab.records.experiment(id).max_slots is None


def test_deleting_an_experiment_asks_first(lab: Lab) -> None:
    id = lab.create("--paused")
    refused = lab.det("e", "delete", id, input="n\n")
    assert refused.exit_code == 1
    assert "scripts" in refused.stdout
    assert lab.records.experiment(id).name == "scripts"
    assert lab.det("e", "delete", id, input="y\n").exit_code == 0
    assert lab.records.experiments() == []
    assert not (lab.home / "experiments" / str(id)).exists()


def test_deleting_without_a_question(lab: Lab) -> None:
    ids = lab.create("--paused"), lab.create("--paused")
    lab.succeeds("e", "delete", "--yes", *ids)
    assert lab.records.experiments() == []


def test_a_running_experiment_is_not_deleted(det: Det, start: Callable[..., tracking.TrialWriter]) -> None:
    recorder = start()
    result = det("e", "delete", 1, "--yes")
    recorder.close()
    assert (result.exit_code, "det experiment kill 1" in result.stderr) == (1, True)
    assert len(json.loads(det("e", "list", "--json").stdout)) == 1


def test_deleting_a_checkpoint_asks_first(det: Det, home: pathlib.Path, finished: tracking.CheckpointSaved) -> None:
    assert det("c", "delete", "abcd", input="n\n").exit_code == 1
    assert pathlib.Path(finished.path).exists()
    assert det("c", "delete", "abcd", "--yes").exit_code == 0
    assert not pathlib.Path(finished.path).exists()
    assert tracking.TrackingReader(home / "tracking.db").checkpoint("abcd-1").state is tracking.CheckpointState.DELETED


def test_a_registered_checkpoint_is_not_deleted(det: Det, finished: tracking.CheckpointSaved) -> None:
    det("m", "create", "digits")
    det("m", "register-version", "digits", "abcd")
    result = det("c", "delete", "abcd", "--yes")
    assert (result.exit_code, "version of a model" in result.stderr) == (1, True)
    assert pathlib.Path(finished.path).exists()


def test_a_model_and_its_versions(det: Det, finished: Any) -> None:
    created = det("m", "create", "digits", "--description", "reads", "--label", "a", "--metadata", "owner=me")
    assert "register-version" in created.stdout
    registered = det("m", "register-version", "digits", "abcd", "--name", "first", "--comment", "good")
    assert registered.stdout == "Checkpoint abcd-1 is version 1 of digits.\n"
    (model,) = json.loads(det("m", "list", "--json").stdout)
    assert (model["name"], model["version_count"], model["metadata"]) == ("digits", 1, {"owner": "me"})
    described = json.loads(det("model", "describe", "digits", "--json").stdout)
    assert described["versions"][0]["checkpoint"] == "abcd-1"
    assert det("m", "list-versions", "digits", "--csv").stdout.splitlines()[1].startswith("1,first,abcd-1,1,1,good,")
    for part in ("digits", "reads", "abcd-1", "first"):
        assert part in det("m", "describe", 1).stdout


def test_a_model_of_a_name_that_is_taken_is_refused(det: Det) -> None:
    assert det("m", "create", "digits").exit_code == 0
    result = det("m", "create", "digits")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


def test_logs_of_more_trials_than_files_can_be_open_are_shown(lab: Lab) -> None:
    id = lab.create("--paused")
    for number in range(300, 0, -1):
        folder = lab.home / "experiments" / str(id) / f"trial-{number}" / "run-1"
        folder.mkdir(parents=True)
        (folder / "rank-0.log").write_text(f"2026-01-01T00:00:00.{number:06}Z\tstdout\tline {number}\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (250, hard))
    try:
        lines = lab.succeeds("e", "logs", id).splitlines()
        last = lab.succeeds("e", "logs", id, "--tail", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [line.rpartition(" ")[2] for line in lines] == [str(number) for number in range(1, 301)]
    assert "[trial 300 rank 0] line 300" in last


def test_a_hostile_name_is_shown_as_text(lab: Lab) -> None:
    id = lab.create("--paused", name="[red]\x1b[31mname", description="[b]bold[/b]")
    lab.succeeds("e", "label", "add", id, "\x07bell")
    for arguments in (("e", "list"), ("e", "describe", id), ("e", "list", "--csv")):
        output = lab.succeeds(*arguments)
        assert output.replace("\n", "").isprintable()
        assert "[red]" in output


def test_an_unexpected_error_is_one_line_and_a_traceback_only_on_request(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab.folder / "broken.py").write_text(
        "from determined.experiment.search import SearchMethod\n"
        "class Broken(SearchMethod):\n"
        "    def suggest(self):\n"
        "        return {'x': 1 / 0}\n"
    )
    path = lab.config(searcher={"name": "custom", "metric": "loss", "method": "broken:Broken"})
    result = lab.det("preview-search", path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "ZeroDivisionError" in result.stderr
    monkeypatch.setenv("DET_DEBUG", "1")
    assert isinstance(lab.det("preview-search", path).exception, ZeroDivisionError)
