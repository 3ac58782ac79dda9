from __future__ import annotations

import csv
import io
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

import forking
from determined import tracking
from determined._version import VERSION

Det = Callable[..., Any]


def _csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_version_names_the_product_and_its_version(det: Det) -> None:
    assert det("version").stdout == f"Resolute {VERSION}\n"


def test_without_a_database_there_are_no_experiments(det: Det, home: pathlib.Path) -> None:
    assert json.loads(det("experiment", "list", "--json").stdout) == []
    assert not home.exists()


def test_experiments_are_listed_in_a_table(det: Det, finished: Any) -> None:
    output = det("experiment", "list").stdout
    assert "digits" in output
    assert "COMPLETED" in output


def test_experiments_are_listed_as_json(det: Det, finished: Any) -> None:
    (experiment,) = json.loads(det("experiment", "list", "--json").stdout)
    assert (experiment["id"], experiment["name"], experiment["checkpoint_count"]) == (1, "digits", 1)


def test_experiments_are_listed_as_csv(det: Det, finished: Any) -> None:
    (row,) = _csv(det("experiment", "list", "--csv").stdout)
    assert (row["id"], row["name"], row["state"], row["trials"]) == ("1", "digits", "COMPLETED", "1")


def test_a_listing_can_be_limited_to_the_newest(det: Det, start: Callable[..., Any]) -> None:
    start(name="old").close()
    start(name="new").close()
    (row,) = _csv(det("experiment", "list", "--csv", "--limit", 1).stdout)
    assert row["name"] == "new"


def test_json_and_csv_at_once_is_a_usage_error(det: Det) -> None:
    result = det("experiment", "list", "--json", "--csv")
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr


@pytest.mark.parametrize(("short", "long"), [("e", "experiment"), ("c", "checkpoint")])
def test_nouns_answer_to_their_first_letter(det: Det, finished: Any, short: str, long: str) -> None:
    assert det(short, "list", "--csv").stdout == det(long, "list", "--csv").stdout != ""


def test_the_trial_noun_answers_to_its_first_letter(det: Det, finished: Any) -> None:
    assert det("t", "describe", 1).stdout == det("trial", "describe", 1).stdout != ""


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("exp ls", "experiment list"),
        ("e desc 1", "experiment describe 1"),
        ("e lt 1", "experiment list-trials 1"),
        ("e lc 1", "experiment list-checkpoints 1"),
        ("t lt 1", "trial list 1"),
        ("t desc 1", "trial describe 1"),
        ("c ls", "checkpoint list"),
        ("m ls", "model list"),
    ],
)
def test_verbs_have_short_names(det: Det, finished: Any, short: str, long: str) -> None:
    result = det(*short.split())
    assert (result.exit_code, result.output) == (0, det(*long.split()).output)


def test_a_master_is_ignored_with_a_warning(det: Det, finished: Any) -> None:
    result = det("-m", "http://localhost:8080", "-u", "me", "e", "ls", "--json")
    assert [one["id"] for one in json.loads(result.stdout)] == [1]
    assert result.stderr == "Warning: --master and --user have no effect: experiments run on this machine.\n"


def test_a_config_is_printed_as_yaml_without_secrets(det: Det, finished: Any) -> None:
    config = yaml.safe_load(det("e", "config", 1).stdout)
    assert config == {"searcher": {"metric": "val_loss"}, "data": {"secrets": {"token": "********"}}}


def test_an_experiment_is_described_with_all_it_takes_to_repeat_it(det: Det, finished: Any, home: pathlib.Path) -> None:
    output = det("experiment", "describe", 1).stdout
    tensorboard = home / "tensorboard" / "experiment-1" / "trial-1"
    for part in ("4711", "2.6.0", "0.1.0", "c0ffee", "train.py", "val_loss 1.5 at step 20", "abcd-1"):
        assert part in output
    assert str(tensorboard) in output


def test_an_experiment_is_described_as_json(det: Det, finished: Any) -> None:
    described = json.loads(det("experiment", "describe", 1, "--json").stdout)
    assert described["trials"][0]["best_validation"]["value"] == 1.5
    assert described["checkpoints"][0]["uuid"] == "abcd-1"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_secrets_of_a_config_are_masked(det: Det, finished: Any, options: tuple[str, ...]) -> None:
    output = det("experiment", "describe", 1, *options).stdout
    assert "token" in output
    assert "hunter2" not in output


def test_secrets_are_masked_in_listings(det: Det, finished: Any) -> None:
    assert "hunter2" not in det("experiment", "list", "--json").stdout


def test_a_trial_is_described_with_a_summary_of_its_metrics(det: Det, finished: Any) -> None:
    output = det("trial", "describe", 1).stdout
    (line,) = [line for line in output.splitlines() if line.split()[:2] == ["training", "loss"]]
    assert line.split()[2:] == ["1", "20", "1", "2", "2"]


def test_every_report_of_a_trial_is_shown_on_request(det: Det, finished: Any) -> None:
    rows = _csv(det("trial", "describe", 1, "--metrics", "--csv").stdout)
    shown = [(row["group"], row["step"], row["loss"], row["val_loss"]) for row in rows]
    assert shown == [
        ("training", "10", "2.0", ""),
        ("training", "20", "1.0", ""),
        ("validation", "20", "", "1.5"),
    ]


def test_reports_are_shown_in_a_table_for_each_group(det: Det, finished: Any) -> None:
    lines = [line.split() for line in det("trial", "describe", 1, "--metrics").stdout.splitlines()]
    assert ["step", "time", "loss", "lr", "batches"] in lines
    assert ["step", "time", "val_loss", "accuracy", "note"] in lines


def test_metrics_that_are_not_finite_leave_the_json_valid(det: Det, finished: Any) -> None:
    described = json.loads(det("trial", "describe", 1, "--metrics", "--json").stdout)
    assert described["metrics"][-1]["metrics"]["accuracy"] == "NaN"


def test_a_trial_is_described_as_csv(det: Det, finished: Any) -> None:
    fields = {row["field"]: row["value"] for row in _csv(det("trial", "describe", 1, "--csv").stdout)}
    assert (fields["seed"], json.loads(fields["hparams"])) == ("4711", {"lr": 0.1})


def test_a_run_whose_process_is_gone_is_shown_as_an_error(det: Det, start: Callable[..., Any]) -> None:
    start(process_started=1000.0).close()
    for arguments in (("experiment", "list"), ("experiment", "describe", 1), ("trial", "describe", 1)):
        assert "ERROR (process gone)" in det(*arguments).stdout


def test_checkpoints_are_listed_for_one_experiment(det: Det, finished: Any, start: Callable[..., Any]) -> None:
    start().close()
    assert [row["uuid"] for row in _csv(det("checkpoint", "list", 1, "--csv").stdout)] == ["abcd-1"]
    assert json.loads(det("checkpoint", "list", 2, "--json").stdout) == []


def test_a_checkpoint_is_described_by_the_beginning_of_its_id(det: Det, finished: Any) -> None:
    output = det("checkpoint", "describe", "abcd").stdout
    for part in ("abcd-1", "weights.bin", "5 B", "pickle"):
        assert part in output


def test_a_checkpoint_is_described_as_json(det: Det, finished: Any) -> None:
    assert json.loads(det("checkpoint", "describe", "abcd", "--json").stdout)["size"] == 5


def test_downloading_copies_the_files(det: Det, finished: Any, tmp_path: pathlib.Path) -> None:
    assert det("checkpoint", "download", "abcd", "--output-dir", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / "weights.bin").read_bytes() == b"12345"


def test_downloading_goes_to_a_folder_named_after_the_checkpoint(
    det: Det, finished: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    det("checkpoint", "download", "abcd")
    assert (tmp_path / "checkpoints" / "abcd-1" / "weights.bin").exists()


def test_downloading_fills_an_empty_folder(det: Det, finished: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "out").mkdir()
    assert det("checkpoint", "download", "abcd", "-o", tmp_path / "out").exit_code == 0


def test_downloading_refuses_to_overwrite(det: Det, finished: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    result = det("checkpoint", "download", "abcd", "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "name another folder" in result.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_downloading_a_damaged_checkpoint_leaves_nothing(
    det: Det, finished: tracking.CheckpointSaved, tmp_path: pathlib.Path
) -> None:
    (pathlib.Path(finished.path) / "weights.bin").write_bytes(b"123")
    result = det("checkpoint", "download", "abcd", "-o", tmp_path / "new" / "out")
    assert result.exit_code == 1
    assert "'weights.bin'" in result.stderr
    assert list((tmp_path / "new").iterdir()) == []


def test_downloading_a_checkpoint_whose_folder_is_gone_says_so(
    det: Det, finished: tracking.CheckpointSaved, tmp_path: pathlib.Path
) -> None:
    pathlib.Path(finished.path).rename(tmp_path / "moved")
    result = det("checkpoint", "download", "abcd", "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert finished.path in result.stderr


def test_downloading_a_deleted_checkpoint_says_so(
    det: Det, finished: Any, home: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with tracking.TrialWriter.attach(home / "tracking.db", 1, 1) as recorder:
        recorder.write([tracking.CheckpointDeleted(uuid="abcd-1")])
    result = det("checkpoint", "download", "abcd", "-o", tmp_path / "out")
    assert (result.exit_code, "was deleted" in result.stderr) == (1, True)


def test_a_reason_of_several_lines_is_shown_in_lines(det: Det, start: Callable[..., Any]) -> None:
    with start() as recorder:
        recorder.write([tracking.StateChanged(state=tracking.RunState.ERROR, time=1.0, reason="two:\n  one\n  other")])
    shown = [line.rstrip() for line in det("trial", "describe", 1).stdout.splitlines()]
    at = next(number for number, line in enumerate(shown) if line.startswith("reason"))
    assert [line.split() for line in shown[at : at + 3]] == [["reason", "two:"], ["one"], ["other"]]


@pytest.mark.parametrize(
    "arguments",
    [
        ("experiment", "describe", 99),
        ("trial", "describe", 99),
        ("trial", "plot", 99),
        ("checkpoint", "list", 99),
        ("checkpoint", "describe", "feedbeef"),
        ("experiment", "describe", 2**70),
    ],
)
def test_an_unknown_id_is_one_line_on_stderr_and_status_1(det: Det, finished: Any, arguments: tuple[Any, ...]) -> None:
    result = det(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_no_database_is_one_line_on_stderr(det: Det, home: pathlib.Path) -> None:
    home.mkdir()
    (home / "tracking.db").write_text("notes, longer than the header of a database file " * 10)
    result = det("experiment", "list")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "tracking.db" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("experiment", "list"),
        ("experiment", "list", "--csv"),
        ("experiment", "list", "--json"),
        ("experiment", "describe", 1),
        ("trial", "describe", 1),
        ("trial", "describe", 1, "--metrics"),
        ("trial", "describe", 1, "--metrics", "--csv"),
        ("checkpoint", "list"),
        ("checkpoint", "describe", "abcd"),
        ("checkpoint", "download", "abcd"),
    ],
)
def test_output_never_holds_control_bytes(det: Det, hostile: Any, arguments: tuple[Any, ...]) -> None:
    result = det(*arguments)
    assert result.output.replace("\n", "").isprintable()
    assert "bad\\" in result.output


def test_a_name_that_looks_like_markup_is_shown_as_it_is(det: Det, hostile: Any) -> None:
    assert "[red]name[/red]" in det("experiment", "list").stdout


def test_a_name_of_a_megabyte_is_cut_in_a_table(det: Det, start: Callable[..., Any]) -> None:
    start(name="x" * 1_000_000).close()
    assert len(det("experiment", "list").stdout) < 10_000


@pytest.mark.process
@pytest.mark.parametrize(
    "program", [[sys.executable, "-m", "determined.cli"], [str(pathlib.Path(sys.executable).with_name("det"))]]
)
def test_the_module_and_the_script_run_as_programs(program: list[str], finished: Any) -> None:
    command = [*program, "experiment", "list", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(result.stdout)[0]["name"] == "digits"


def test_an_error_of_the_program_shows_no_traceback(home: pathlib.Path) -> None:
    result = forking.run(["-m", "determined.cli", "trial", "describe", "7"], capture_output=True, timeout=120)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: there is no trial 7")
    assert result.stderr.count("\n") == 1


def test_output_survives_a_stream_that_cannot_show_it(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(name="Ziffern für Zoë").close()
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    command = ["-m", "determined.cli", "experiment", "list"]
    result = forking.run(command, capture_output=True, timeout=120, check=True)
    assert r"f\xfcr" in result.stdout
