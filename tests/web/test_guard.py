"""Who may ask the page for what."""

from __future__ import annotations

import pathlib
import re
import socket
from collections.abc import Iterator

import pytest
from site_of_tests import Site, served

from determined import tracking

PATHS = (
    "/", "/experiments/1", "/experiments/1/curves", "/experiments/1/trials.csv", "/trials/1", "/trials/1/curves",
    "/live/", "/live/experiments/1", "/live/trials/1", "/static/page.js", "/static/plotly.js", "/nothing",
)  # fmt: skip
CHANGES = (
    "/experiments/1/pause",
    "/experiments/1/activate",
    "/experiments/1/cancel",
    "/experiments/1/kill",
    "/trials/1/kill",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")
JSON = {"Content_Type": "application/json"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A page with one experiment that nobody drives."""
    with served(tmp_path_factory.mktemp("home")) as found:
        found.add_experiment(trials=1)
        yield found


@pytest.fixture(scope="module")
def open_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A page that other machines can reach."""
    with served(tmp_path_factory.mktemp("home"), "--host", "0.0.0.0") as found:
        found.add_experiment(trials=1)
        yield found


@pytest.fixture
def unchanged(site: Site) -> Iterator[None]:
    """Fail a test after which the record is another one."""
    records = tracking.TrackingReader(site.home.database)
    before = records.experiment(1), records.trial(1)
    yield
    assert (records.experiment(1), records.trial(1)) == before


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("path", PATHS + CHANGES)
def test_strangers_are_refused_everywhere(site: Site, path: str) -> None:
    assert site.ask(path, Host="evil.example").status == 403
    assert site.ask(path, "POST", b"{}", **JSON, Origin="http://evil.example").status == 403


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["/", "/experiments/1/kill"])
def test_strangers_of_every_kind_are_refused(site: Site, path: str, method: str) -> None:
    own = f"http://{site.host}"
    for headers in (
        {"Host": "evil.example"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost:x"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"{own}.evil.example"},
        {"Origin": own.replace("http:", "https:")},
    ):
        answer = site.ask(path, method, b"{}" if method == "POST" else None, **JSON, **headers)
        assert answer.status == 403, headers
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("path", CHANGES)
def test_only_the_page_itself_changes_anything(site: Site, path: str) -> None:
    own = {"Origin": f"http://{site.host}"}
    assert site.ask(path).status == 405
    assert site.ask(path, "POST", b"{}", **JSON).status == 403  # no browser leaves the Origin out
    assert site.ask(path, "POST", b"{}", Content_Type="text/plain", **own).status == 415
    assert site.ask(path, "POST", b"a=b", Content_Type="application/x-www-form-urlencoded", **own).status == 415
    assert site.ask(path, "POST", b"{}" + b" " * 20_000, **JSON, **own).status == 413
    for method in METHODS[3:]:
        assert site.ask(path, method, **JSON, **own).status == 405


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "path", ["/static/../_app.py", "/static/..%2f_app.py", "/static/%2e%2e/_app.py", "//etc/passwd"]
)
def test_no_other_files_are_given(site: Site, path: str) -> None:
    assert site.ask(path).status == 404


def test_websockets_are_not_spoken(site: Site) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Key": "x", "Sec_WebSocket_Version": "13"}
    assert site.ask("/live/experiments/1x", **headers).status == 404


@pytest.mark.parametrize("path", [path for path in PATHS if "live" not in path])
def test_every_answer_forbids_what_the_page_does_not_need(site: Site, path: str) -> None:
    headers = site.ask(path).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", socket.gethostname(), "LOCALHOST"])
@pytest.mark.parametrize("port", ["", ":1234"])
def test_names_of_this_machine_are_welcome(site: Site, name: str, port: str) -> None:
    assert site.ask("/", Host=f"{name}{port}").status == 200


def test_links_of_other_sites_lead_here(site: Site) -> None:
    elsewhere = {"Sec_Fetch_Site": "cross-site"}
    assert site.ask("/", **elsewhere, Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document").status == 200
    assert site.ask("/", **elsewhere, Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="iframe").status == 403
    assert site.ask("/static/page.js", **elsewhere, Sec_Fetch_Mode="no-cors", Sec_Fetch_Dest="script").status == 403


def test_two_lengths_of_a_body_are_refused(site: Site) -> None:
    headers = {"Origin": f"http://{site.host}", **JSON, "Transfer_Encoding": "chunked", "Content_Length": "2"}
    assert site.ask("/experiments/1/pause", "POST", b"2\r\n{}\r\n0\r\n\r\n", **headers).status in (400, 413)


def test_head_of_a_live_page_ends(site: Site) -> None:
    assert site.ask("/live/experiments/1", "HEAD").status == 200


def test_token_on_this_machine(tmp_path: pathlib.Path) -> None:
    with served(tmp_path, "--token") as own:
        assert own.ask("/").status == 401
        assert own.ask("/", Authorization=f"Bearer {own.token}").status == 200


def test_buttons_offer_what_can_be_done(site: Site) -> None:
    id = site.add_experiment("with buttons")

    def offered() -> list[str]:
        return re.findall(rf'data-post="/experiments/{id}/([a-z]+)"', site.ask(f"/experiments/{id}").text)

    assert offered() == ["activate", "cancel", "kill"]  # nobody drives it
    with tracking.ExperimentStore.open(site.home.database, id) as store:
        store.claim()
        assert offered() == ["pause", "cancel", "kill"]
        store.ask(desired=tracking.Desired.PAUSED)
        assert offered() == ["activate", "cancel", "kill"]
        store.ask(desired=tracking.Desired.CANCELED)
        assert offered() == ["kill"]
        store.release()


def test_pause_button_pauses(site: Site) -> None:
    id = site.add_experiment("to pause")
    assert tracking.TrackingReader(site.home.database).experiment(id).state is tracking.RunState.ACTIVE
    assert site.post(f"/experiments/{id}/pause").status == 200
    assert tracking.TrackingReader(site.home.database).experiment(id).state is tracking.RunState.PAUSED


def test_kill_button_of_a_trial_asks_for_its_end(site: Site) -> None:
    trial = site.trials(site.add_experiment("to kill"))[0]
    assert site.post(f"/trials/{trial}/kill").status == 200
    assert tracking.TrackingReader(site.home.database).trial(trial).requested is tracking.TrialRequest.KILL


def test_impossible_wish_is_explained(site: Site) -> None:
    answer = site.post("/experiments/9999/pause")
    assert (answer.status, "there is no experiment 9999" in answer.data["error"]) == (404, True)
    assert site.post("/experiments/1/dance").status == 404


# A page that other machines can reach


@pytest.mark.parametrize("path", PATHS + CHANGES)
def test_without_the_token_nothing_is_given(open_site: Site, path: str) -> None:
    for headers in ({}, {"Cookie": "det_ui_=wrong"}, {"Authorization": "Bearer wrong"}, {"Cookie": "det_ui; =;;,"}):
        assert open_site.ask(path, Host="127.0.0.1", **headers).status == 401
        assert open_site.post(path, Host="127.0.0.1", Origin="http://127.0.0.1", **headers).status == 401
    assert open_site.ask(f"{path}?token=wrong", Host="127.0.0.1").status == 401


def test_token_is_taken_from_the_address_into_a_cookie(open_site: Site) -> None:
    answer = open_site.ask(f"/experiments/1?sort=lr&token={open_site.token}", Host="127.0.0.1")
    assert (answer.status, answer.headers["location"]) == (303, "/experiments/1?sort=lr")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert open_site.ask("/experiments/1", Host="127.0.0.1", Cookie=cookie.partition(";")[0]).status == 200


def test_token_as_a_header(open_site: Site) -> None:
    assert open_site.ask("/", Host="127.0.0.1", Authorization=f"Bearer {open_site.token}").status == 200


def test_token_does_not_excuse_another_page(open_site: Site) -> None:
    headers = {"Authorization": f"Bearer {open_site.token}", "Origin": "http://evil.example", **JSON}
    assert open_site.ask("/experiments/1/kill", "POST", b"{}", Host="127.0.0.1", **headers).status == 403


def test_page_behind_a_proxy_with_tls(open_site: Site) -> None:
    id = open_site.add_experiment("behind a proxy")
    headers = {"Authorization": f"Bearer {open_site.token}", "Host": "page.example", "Origin": "https://page.example"}
    assert open_site.post(f"/experiments/{id}/pause", **headers).status == 200
    assert open_site.post(f"/experiments/{id}/pause", **headers | {"Origin": "https://evil.example"}).status == 403


def test_tokens_differ(open_site: Site, tmp_path: pathlib.Path) -> None:
    with served(tmp_path, "--host", "0.0.0.0") as other:
        assert len(other.token) > 30
        assert other.token != open_site.token
