"""Pages that follow what happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from browser import browser
from site_of_tests import Site

from det_command import run_det
from determined import tracking

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

SEEN = """
Object.defineProperty(document, "visibilityState", {value: "STATE", configurable: true});
document.dispatchEvent(new Event("visibilitychange"));
"""


def test_report_changes_the_page(site: Site) -> None:
    id = site.add_experiment()
    best = site.trials(id)[0]
    with site.events(f"/live/experiments/{id}") as events:
        kind, parts = next(events)
        assert (kind, set(parts)) == ("parts", {"summary", "actions", "trials", "checkpoints", "curves"})
        site.report(id, best, (5, 0.001))
        kind, parts = next(events)
        assert (kind, "checkpoints" in parts) == ("parts", False)
        assert "<strong>0.001</strong> at step 5" in parts["summary"]


def test_new_experiment_appears_in_the_list(site: Site) -> None:
    with site.events("/live/") as events:
        next(events)
        site.add_experiment("just begun")
        assert "just begun" in next(events)[1]["experiments"]


def test_line_of_output_appears(site: Site) -> None:
    id = site.add_experiment()
    trial = site.trials(id)[0]
    with site.events(f"/live/trials/{trial}") as events:
        next(events)
        site.write_log(id, trial, "a new line")
        assert "a new line" in next(events)[1]["log"]


def test_end_of_a_record_ends_its_page(site: Site) -> None:
    with site.events("/live/experiments/9999") as events:
        kind, said = next(events)
        assert (kind, "there is no experiment 9999" in said) == ("trouble", True)
        assert next(events, None) is None


def test_browser_shows_curves_news_and_buttons(site: Site, tmp_path: pytest.TempPathFactory) -> None:
    id = site.add_experiment("in a browser")
    best = site.trials(id)[0]
    with browser(tmp_path) as tab:
        tab.open(f"{site.url}experiments/{id}")
        tab.wait_for("document.querySelectorAll('.charts .scatterlayer .trace').length === 3 + 1")
        site.report(id, best, (5, 0.001))
        tab.wait_for("document.querySelector('#summary strong').textContent === '0.001'")
        tab.wait_for("document.querySelector('.charts .chart').data.at(-1).y.length === 5")
        # Nobody drives it, so that the page offers to go on; what cannot be done is said.
        tab.evaluate("document.querySelector('button[data-post$=activate]').click()")
        tab.wait_for("!document.getElementById('message').hidden")
        tab.open(f"{site.url}trials/{best}")
        tab.wait_for("document.querySelector('.charts .scatterlayer .trace')")
        tab.evaluate("const axis = document.querySelector('select[name=axis]'); axis.value = 'epochs';"
                     "axis.dispatchEvent(new Event('change'))")  # fmt: skip
        tab.wait_for(
            "location.search === '?axis=epochs' && document.querySelector('.xtitle')?.textContent === 'epochs trained'"
        )
        tab.open(site.url)
        tab.wait_for("document.getElementById('connection').textContent === 'live'")
        tab.evaluate(SEEN.replace("STATE", "hidden"))
        site.add_experiment("begun meanwhile")
        assert tab.evaluate("source") is None
        tab.evaluate(SEEN.replace("STATE", "visible"))
        tab.wait_for("document.getElementById('experiments').textContent.includes('begun meanwhile')")
        assert [one for one in tab.complaints if "409" not in one] == []


def test_page_ends_at_once_with_a_reader(site: Site, tmp_path: pytest.TempPathFactory) -> None:
    command = [sys.executable, "-m", "determined.cli", "ui", "--port", "0"]
    environment = {**os.environ, "DET_HOME": str(site.home.path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            other = Site(site.home, process.stdout.readline().split()[4])
            with other.events("/live/") as events:
                next(events)
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=30)
            assert (process.returncode, said) == (0, "")
        finally:
            process.kill()


def test_busy_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        result = run_det("ui", "--port", port)
    assert (result.exit_code, f"port {port}" in result.stderr, "--port" in result.stderr) == (1, True, True)


def test_marker_differs_after_any_write(site: Site) -> None:
    id = site.add_experiment()
    records = tracking.TrackingReader(site.home.database)
    before = records.marker()
    assert records.marker() == before
    site.report(id, site.trials(id)[0], (9, 1.0))
    assert records.marker() != before
