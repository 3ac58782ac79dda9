"""A whole experiment whose tracking database is on a server that stops and starts again."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import postgres_server
from determined import tracking
from determined._home import Home
from determined.experiment import control

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PROGRAM = """
import pathlib, time
import determined as det
from determined import core

hparams = det.get_cluster_info().trial.hparams
here = pathlib.Path(hparams["folder"])
with core.init() as context:
    for step in range(1, 9):
        if step == 4:
            (here / "half").touch()
            while not (here / "go").exists():
                time.sleep(0.02)
        context.train.report_training_metrics(step, {"loss": 2 * hparams["x"] / step})
        context.train.report_validation_metrics(step, {"loss": hparams["x"] / step, "batches": step})
        if context.preempt.should_preempt():
            break
"""
BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
SEARCHER = {"name": "random", "metric": "loss", "max_trials": 4, "max_concurrent_trials": 2}


class Command:
    """`det experiment create --follow` of a small search, with a home folder and a database of its own."""

    def __init__(self, folder: pathlib.Path, database: str) -> None:
        self.folder, self.database = folder, database
        (folder / "code").mkdir(parents=True)
        (folder / "code" / "train.py").write_text(PROGRAM)
        config = {
            "name": "restarts",
            "entrypoint": [sys.executable, "train.py"],
            "hyperparameters": {"x": {"type": "double", "minval": 1, "maxval": 2}, "folder": str(folder)},
            "searcher": SEARCHER,
            "reproducibility": {"experiment_seed": 1},
            "max_restarts": 0,
        }
        (folder / "config.yaml").write_text(json.dumps(config))
        command = ["experiment", "create", folder / "config.yaml", folder / "code", "--follow", "--slots", "2"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "determined.cli", *map(str, command)],
            env={**os.environ, "DET_HOME": str(folder / "home"), "DET_DATABASE": database},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> str:
        """Wait for its end and return what it has printed."""
        output, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, output
        return output

    def found(self) -> list[Any]:
        """Return the hyperparameters, the state and the metrics of each trial."""
        records = tracking.TrackingReader(self.database or self.folder / "home" / "tracking.db")
        return [
            (
                (trial.hparams["x"], trial.seed, trial.state, trial.restarts),
                [(one.group, one.steps_completed, one.metrics) for one in records.metrics(trial.id)],
            )
            for trial in records.trials(1)
        ]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


@pytest.mark.parametrize("at_once", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_an_experiment_is_the_same_though_its_server_is_away_for_a_while(at_once: bool, tmp_path: pathlib.Path) -> None:
    on_file = Command(tmp_path / "file", "")
    (on_file.folder / "go").touch()
    on_file.end()
    with postgres_server.server() as server:
        on_server = Command(tmp_path / "server", server.url)
        until((on_server.folder / "half").exists)
        server.stop(at_once=at_once)
        (on_server.folder / "go").touch()
        log = on_server.folder / "home" / "experiments" / "1" / "runner.log"
        until(lambda: "Waiting for the tracking database" in log.read_text())
        server.start()
        output = on_server.end()
        assert on_server.found() == on_file.found()
        assert len(on_file.found()) == SEARCHER["max_trials"]
    assert output.count("Waiting for the tracking database") <= 1  # it looks twice a second
    assert "The tracking database can be used again" in log.read_text()


def test_those_who_wait_for_an_experiment_outlive_a_restart(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    import psycopg

    with postgres_server.server() as server, concurrent.futures.ThreadPoolExecutor(1) as threads:
        home = Home(tmp_path, server.url)
        description = tracking.ExperimentDescription(name="awaited", config={})
        with tracking.ExperimentStore.create(server.url, description) as store:
            store.claim()
            with psycopg.connect(server.url) as holding, psycopg.connect(server.url, autocommit=True) as looking:
                holding.execute("LOCK TABLE trials")  # which only those read who have opened the database
                waiting = threads.submit(control.wait, store.experiment_id, 100, home)
                until(lambda: looking.execute(BLOCKED).fetchone() == (1,))
                server.stop()
                holding.close()
            until(lambda: "Waiting for the tracking database" in caplog.text)
            server.start()
            end = tracking.Changeset(experiment_change=tracking.ExperimentChange(state=tracking.RunState.COMPLETED))
            tracking.when_available(lambda: store.commit(end))
            store.release()
            assert waiting.result(60) is tracking.RunState.COMPLETED
