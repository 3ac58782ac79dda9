"""A page over a home folder with an experiment in it, served by `det ui`."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from determined import tracking
from determined._home import Home

CONFIG = {
    "name": "search",
    "searcher": {"name": "random", "metric": "loss", "smaller_is_better": True},
    "checkpoint_storage": {"type": "s3", "secret_key": "hidden-from-the-page"},
}


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def data(self) -> Any:
        return json.loads(self.text)


@dataclasses.dataclass(frozen=True)
class Site:
    home: Home
    url: str
    token: str = ""

    @property
    def host(self) -> str:
        return urllib.parse.urlsplit(self.url).netloc

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", urllib.parse.urlsplit(self.url).port, timeout=60)

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
        """Send a request; headers are written with underscores for dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(self.connection()) as connection:
            connection.request(method, path, body, {"Host": self.host, **named})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode())

    def post(self, path: str, **headers: str) -> Answer:
        """Send what a button of the page sends."""
        usual = {"Origin": f"http://{self.host}", "Content_Type": "application/json"}
        return self.ask(path, "POST", b"{}", **{**usual, **headers})

    def events(self, path: str) -> contextlib.AbstractContextManager[Iterator[tuple[str, Any]]]:
        return _events(self, path)

    def add_experiment(
        self, name: str = "search", trials: int = 3, reports: int = 4, hparams: Sequence[Mapping[str, Any]] = ()
    ) -> int:
        """Record an experiment whose trial `n` has the loss `n / step`; returns its id."""
        chosen = hparams or [{"lr": 10.0**-i, "net": {"width": 8}} for i in range(1, trials + 1)]
        description = tracking.ExperimentDescription(name=name, config=CONFIG | {"name": name})
        with tracking.ExperimentStore.create(self.home.database, description) as store:
            new = [
                tracking.NewTrial(request_id=str(number), hparams=one, seed=number, entrypoint="x:Y")
                for number, one in enumerate(chosen, 1)
            ]
            store.claim()
            ids = store.commit(tracking.Changeset(new_trials=new))
            store.commit(tracking.Changeset(trial_changes=[tracking.TrialChange(trial_id=id, run_id=1) for id in ids]))
            for number, id in enumerate(ids, 1):
                self.report(store.experiment_id, id, *((step, number / step) for step in range(1, reports + 1)))
            store.release()
            return store.experiment_id

    def report(self, experiment_id: int, trial_id: int, *losses: tuple[int, float]) -> None:
        with tracking.TrialWriter.attach(self.home.database, experiment_id, trial_id, 1) as recorder:
            recorder.write(
                [
                    tracking.MetricReport(
                        group="validation",
                        steps_completed=step,
                        metrics={"loss": loss, "epochs": step / 2},
                        time=100.0 + step,
                    )
                    for step, loss in losses
                ]
            )

    def trials(self, experiment_id: int) -> list[int]:
        return [trial.id for trial in tracking.TrackingReader(self.home.database).trials(experiment_id)]

    def write_log(self, experiment_id: int, trial_id: int, *lines: str) -> None:
        log = self.home.run(experiment_id, trial_id, 1).log(0)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.writelines(f"2026-01-31T12:00:00.000000+00:00\tstdout\t{line}\n" for line in lines)


@contextlib.contextmanager
def _events(site: Site, path: str) -> Iterator[Iterator[tuple[str, Any]]]:
    """Give the events of a live page as they come."""
    with contextlib.closing(site.connection()) as connection:
        connection.request("GET", path, headers={"Host": site.host})
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("content-type")) == (200, "text/event-stream; charset=utf-8")

        def found() -> Iterator[tuple[str, Any]]:
            kind = ""
            while line := answer.readline().decode():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ").strip()
                elif line.startswith("data: "):
                    yield kind, json.loads(line.removeprefix("data: "))

        yield found()


@contextlib.contextmanager
def served(folder: pathlib.Path, *options: str) -> Iterator[Site]:
    """Give the page that `det ui` serves over a new home folder."""
    for package in ("starlette", "uvicorn", "jinja2", "plotly"):
        pytest.importorskip(package, reason=f"{package} is not installed (pip install 'resolute[web]')")
    command = [sys.executable, "-m", "determined.cli", "ui", "--port", "0", *options]
    environment = {**os.environ, "DET_HOME": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[4]
            token = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query).get("token", [""])[0]
            yield Site(Home(folder, os.environ.get("DET_DATABASE")), url, token)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
