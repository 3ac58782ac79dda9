"""Servers that restart, connections that break at the worst moment: nothing is lost, and nothing is stored twice."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import driving
import pytest
from driving import add_trials, event, new_trial, report

import postgres_server
from cutting_proxy import CuttingProxy, Moment, proxied
from determined import core, errors, tracking
from determined.tracking import Changeset


@pytest.fixture
def proxy(postgresql_database: str) -> Iterator[CuttingProxy]:
    with proxied(postgresql_database) as made:
        yield made


def until_stored(write: Callable[[], Any]) -> Any:
    """Repeat a write that the server did not take, as those do who wait for it."""
    return tracking.when_available(write, wait=lambda _: time.sleep(0.01))


@pytest.mark.parametrize("moment", ["before the commit", "after the commit"])
def test_a_report_is_stored_once_though_its_commit_is_cut_off(
    moment: Moment, proxy: CuttingProxy, postgresql_database: str, describe_run: Callable[..., Any]
) -> None:
    with tracking.TrialWriter.start(proxy.url, describe_run()) as writer:
        for step in range(1, 6):
            proxy.cut = moment
            until_stored(lambda step=step: writer.write([report(step, loss=1.0)]))
    assert proxy.cuts == 5
    found = tracking.TrackingReader(postgresql_database).metrics(writer.trial_id)
    assert [one.steps_completed for one in found] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("moment", ["before the commit", "after the commit"])
def test_a_runner_goes_on_though_its_commits_are_cut_off(moment: Moment, proxy: CuttingProxy) -> None:
    with driving.claimed(proxy.url) as store:
        proxy.cut = moment
        changes = Changeset(events=[event(1)], new_trials=[new_trial("one"), new_trial("two")])
        ids = until_stored(lambda: store.commit(changes))
        proxy.cut = moment
        run = Changeset(trial_changes=[tracking.TrialChange(trial_id=ids[0], run_id=1)])
        until_stored(lambda: store.commit(run))
        assert [(one.id, one.run_id) for one in store.trials()] == [(ids[0], 1), (ids[1], 0)]
        assert [one.number for one in store.events()] == [1]
    assert proxy.cuts == 2


@pytest.mark.parametrize("moment", ["before the commit", "after the commit"])
def test_an_experiment_is_created_once_or_not_at_all(moment: Moment, proxy: CuttingProxy) -> None:
    tracking.TrackingReader(proxy.url).experiments()
    with driving.claimed(proxy.url):  # so that there are tables
        proxy.cut = moment
        with contextlib.suppress(errors.DatabaseException):
            tracking.ExperimentStore.create(proxy.url, driving.describe()).close()
    found = tracking.TrackingReader(proxy.url).experiments()
    assert (proxy.cuts, len(found)) == (1, 1 if moment == "before the commit" else 2)


@contextlib.contextmanager
def connections_cut(url: str) -> Iterator[None]:
    """End all connections to a database, over and over."""
    import psycopg

    is_over = threading.Event()
    end = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )

    def cut() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not is_over.wait(0.03):
                connection.execute(end)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("writers", [2, pytest.param(10, marks=pytest.mark.thorough)])
def test_connections_that_are_ended_at_any_moment_lose_and_double_nothing(
    writers: int, postgresql_database: str
) -> None:
    writes = 60
    seen: list[tracking.Validation] = []

    def read(store: tracking.ExperimentStore) -> None:
        seen.extend(until_stored(lambda: store.validations(after_id=seen[-1].id if seen else 0)))

    with driving.claimed(postgresql_database) as store:
        ids = add_trials(store, writers)

        def train(trial_id: int) -> None:
            writer = until_stored(
                lambda: tracking.TrialWriter.attach(postgresql_database, store.experiment_id, trial_id, 1)
            )
            with writer:
                for step in range(1, writes + 1):
                    reports = [report(step, group, loss=1.0) for group in ("training", "validation")]
                    until_stored(lambda reports=reports: writer.write(reports))

        with connections_cut(postgresql_database), concurrent.futures.ThreadPoolExecutor(writers) as threads:
            working = [threads.submit(train, id) for id in ids]
            while len(seen) < writers * writes and not any(one.done() and one.exception() for one in working):
                read(store)
            for one in working:
                one.result(60)
        assert [one.id for one in seen] == list(range(1, writers * writes + 1))
        for id in ids:
            found = tracking.TrackingReader(postgresql_database).metrics(id)
            assert [one.steps_completed for one in found if one.group == "training"] == list(range(1, writes + 1))


@pytest.mark.process
@pytest.mark.parametrize("at_once", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_training_outlives_a_restart_and_waits_for_the_server_at_its_end(
    at_once: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_checked = threading.Event()

    def start_later() -> None:
        time.sleep(1.5)
        server.start()
        is_checked.wait(60)  # the server would end with the thread that has started it

    with postgres_server.server() as server:
        monkeypatch.setenv("DET_DATABASE", server.url)
        with core.init() as context:
            context.train.report_training_metrics(1, {"loss": 1.0})
            context.flush()
            server.stop(at_once=at_once)
            for step in range(2, 5):
                context.train.report_validation_metrics(step, {"loss": 1.0})
                context.flush()
            server.start()
            context.train.report_training_metrics(5, {"loss": 1.0})
            context.flush()
            server.stop(at_once=at_once)
            context.train.report_training_metrics(6, {"loss": 1.0})
            later = threading.Thread(target=start_later)
            later.start()
        (experiment,) = tracking.TrackingReader().experiments()
        (trial,) = tracking.TrackingReader().trials(experiment.id)
        assert trial.state is tracking.RunState.COMPLETED
        steps = [one.steps_completed for one in tracking.TrackingReader().metrics(trial.id)]
        assert steps == [1, 2, 3, 4, 5, 6]
        assert "cannot be written" in caplog.text
        is_checked.set()
        later.join()


@pytest.mark.process
def test_a_claim_that_could_not_be_renewed_while_the_server_was_away_holds_a_while_longer() -> None:
    import psycopg

    with postgres_server.server() as server, driving.claimed(server.url) as store:
        store.claim(driving.elsewhere(), force=True)
        with psycopg.connect(server.url) as connection:
            connection.execute("UPDATE runners SET alive_until = 1.0")
        server.stop()
        server.start()
        with psycopg.connect(server.url) as connection:
            (start,) = connection.execute("SELECT extract(epoch FROM pg_postmaster_start_time())::float").fetchone()
        runner = until_stored(store.runner)
        assert runner.alive_until == pytest.approx(start + 60.0)
        assert not runner.is_gone
        with pytest.raises(errors.ConflictException, match="is run by process 4242"):
            store.claim()
