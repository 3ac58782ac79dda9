"""What the pages show."""

from __future__ import annotations

import csv
import html
import io
import json
import re

import pytest
from site_of_tests import Site

from determined import tracking


@pytest.fixture(scope="module")
def search(site: Site) -> int:
    """An experiment of three trials, the first of which is the best."""
    return site.add_experiment("a search")


def links(text: str, to: str) -> list[int]:
    """The ids that a page links to, in their order."""
    return [int(id) for id in re.findall(rf'<td><a href="/{to}/(\d+)">', text)]


def test_list_shows_experiments_newest_first(site: Site, search: int) -> None:
    later = site.add_experiment("a later one")
    text = site.ask("/").text
    assert text.index("a later one") < text.index("a search")
    assert f'href="/experiments/{later}"' in text


def test_experiment_shows_the_best_trial_first(site: Site, search: int) -> None:
    text = site.ask(f"/experiments/{search}").text
    trials = site.trials(search)
    assert links(text, "trials")[:3] == trials
    assert f'<a href="/trials/{trials[0]}">trial {trials[0]}</a>: lr = 0.1' in text
    assert "<strong>0.25</strong> at step 4" in text


def test_trials_are_sorted_by_any_column(site: Site, search: int) -> None:
    trials = site.trials(search)
    assert links(site.ask(f"/experiments/{search}?sort=hparam+lr").text, "trials")[:3] == trials[::-1]
    assert links(site.ask(f"/experiments/{search}?sort=hparam+lr&order=desc").text, "trials")[:3] == trials


def test_many_trials_are_on_several_pages(site: Site) -> None:
    id = site.add_experiment(trials=230, reports=1)
    trials = site.trials(id)
    pages = [
        links(site.ask(f"/experiments/{id}?sort=trial&order=asc&page={page}").text, "trials") for page in (1, 2, 3)
    ]
    assert [found[:100] for found in pages] == [trials[:100], trials[100:200], trials[200:]]
    assert "page=3" in site.ask(f"/experiments/{id}?sort=trial&order=asc&page=2").text


def test_order_keeps_what_else_was_chosen(site: Site, search: int) -> None:
    text = site.ask(f"/experiments/{search}?axis=seconds&sort=hparam+lr&page=1").text
    assert 'href="?axis=seconds&amp;sort=hparam+lr&amp;order=desc"' in text


def test_hyperparameters_may_be_called_as_columns_are(site: Site) -> None:
    trials = [{"best": 3, "state": "b"}, {"best": 1, "state": "c"}, {"best": 2, "state": "a"}]
    id = site.add_experiment("odd names", hparams=trials)
    ids = site.trials(id)
    assert links(site.ask(f"/experiments/{id}?sort=hparam+best").text, "trials")[:3] == [ids[1], ids[2], ids[0]]
    assert links(site.ask(f"/experiments/{id}?sort=best").text, "trials")[:3] == ids


ODD = [
    10**400,
    -(10**400),
    float("nan"),
    float("inf"),
    True,
    None,
    "text",
    "2020-1",
    "<a href='/'>",
    [1],
    "x" * 10**6,
    "\ud800",
]


def test_odd_values_are_shown(site: Site) -> None:
    hparams = [{"odd": value, "n" * 10_000: number, "\udc80": number} for number, value in enumerate(ODD)]
    id = site.add_experiment("odd values", hparams=hparams)
    paths = ["", "?sort=hparam+odd", "/curves?hparam=odd", "/curves", "/trials.csv"]
    answers = [site.ask(f"/experiments/{id}{path}") for path in paths]
    assert [answer.status for answer in answers] == [200] * len(paths)
    scatter = answers[2].data["scatter"]
    assert (scatter["kind"], len(scatter["points"]["x"])) == ("category", len(ODD))
    assert max(len(place) for place in scatter["points"]["x"]) <= 200
    assert len(answers[0].text) < 200_000


def test_scores_over_numbers(site: Site) -> None:
    kinds = {"linear": [1, 2, 3], "log": [1e-5, 1e-3, 1e-1]}
    for kind, values in kinds.items():
        id = site.add_experiment(kind, hparams=[{"x": value} for value in values])
        scatter = site.ask(f"/experiments/{id}/curves").data["scatter"]
        assert (scatter["kind"], scatter["points"]["x"]) == (kind, values)


def test_only_trial_shows_all_its_curves(site: Site) -> None:
    id = site.add_experiment(trials=1)
    (trial,) = site.trials(id)
    with tracking.TrialWriter.attach(site.home.database, id, trial, 1) as recorder:
        recorder.write(
            [tracking.MetricReport(group="training", steps_completed=1, metrics={"accuracy": 1.0}, time=1.0)]
        )
    titles = [panel["title"] for panel in site.ask(f"/experiments/{id}/curves").data["panels"]]
    assert sorted(titles) == ["accuracy", "loss"]


def test_long_lines_of_output_are_cut(site: Site, search: int) -> None:
    trial = site.trials(search)[2]
    site.write_log(search, trial, *["x" * 10**5] * 300)
    assert len(site.ask(f"/trials/{trial}").text) < 10**6


def test_what_the_browser_has_is_not_sent_again(site: Site) -> None:
    first = site.ask("/static/plotly.js")
    again = site.ask("/static/plotly.js", If_None_Match=first.headers["etag"])
    assert (first.status, len(first.text) > 10**6, again.status, again.text) == (200, True, 304, "")


@pytest.mark.parametrize(
    "query",
    ["sort=nothing", "page=0", "page=-1", "page=x", "page=99999999999999", "page=7", "order=%00", "sort=hparam+"],
)
def test_odd_wishes_are_harmless(site: Site, search: int, query: str) -> None:
    assert site.ask(f"/experiments/{search}?{query}").status == 200


def test_secrets_are_hidden(site: Site, search: int) -> None:
    text = site.ask(f"/experiments/{search}").text
    assert "secret_key" in text
    assert "hidden-from-the-page" not in text


def test_trial_shows_metrics_and_output(site: Site, search: int) -> None:
    trial = site.trials(search)[1]
    site.write_log(search, trial, "first line", "\x1b[31mcoloured\x1b[0m \x07 <b>bold</b>")
    text = site.ask(f"/trials/{trial}").text
    assert "loss 0.5 at step 4" in text
    assert "[rank 0] first line" in text
    assert r"coloured \x07 &lt;b&gt;bold&lt;/b&gt;" in text


def test_names_are_text_and_nothing_else(site: Site) -> None:
    name = "<script>alert(1)</script> {{ 7 * 7 }} ' \" & \x00\x1b \u202e"
    id = site.add_experiment(name)
    trial = site.trials(id)[0]
    with tracking.TrialWriter.attach(site.home.database, id, trial, 1) as recorder:
        report = tracking.MetricReport(
            group="<i>", steps_completed=9, metrics={"<img src=x>": 1.0, "loss": 9.0}, time=1.0
        )
        recorder.write([report])
    for path in ("/", f"/experiments/{id}", f"/trials/{trial}", f"/experiments/{id}/curves", f"/trials/{trial}/curves"):
        answer = site.ask(path)
        assert answer.status == 200
        if "html" in answer.headers["content-type"]:
            assert "<script>alert" not in answer.text
            assert "<img" not in answer.text
            assert "49" not in re.findall(r"<h1>.*</h1>", answer.text)[0]
    assert html.escape("<script>alert(1)</script>", quote=False) in site.ask("/").text


def test_curves_of_an_experiment(site: Site, search: int) -> None:
    data = site.ask(f"/experiments/{search}/curves").data
    (panel,) = data["panels"]
    assert [curve["trial"] for curve in panel["curves"]] == site.trials(search)
    assert (panel["curves"][0]["x"], panel["curves"][0]["y"]) == ([1, 2, 3, 4], [1.0, 1 / 2, 1 / 3, 1 / 4])
    assert data["scatter"]["points"]["y"] == [1 / 4, 2 / 4, 3 / 4]
    assert data["hparams"] == ["lr"]


@pytest.mark.parametrize(("axis", "x"), [("epochs", [0.5, 1.0, 1.5, 2.0]), ("batches", [1, 2, 3, 4])])
def test_axis_can_be_chosen(site: Site, search: int, axis: str, x: list[float]) -> None:
    data = site.ask(f"/experiments/{search}/curves?axis={axis}").data
    assert data["panels"][0]["curves"][0]["x"] == x


def test_long_curves_keep_their_peaks(site: Site) -> None:
    id = site.add_experiment(trials=1, reports=0)
    (trial,) = site.trials(id)
    site.report(id, trial, *((step, 1000.0 if step == 4321 else 1.0) for step in range(1, 10_001)))
    (curve,) = site.ask(f"/trials/{trial}/curves").data["panels"][0]["curves"]
    assert len(curve["x"]) <= 1001
    assert curve["x"] == sorted(curve["x"])
    assert curve["y"][curve["x"].index(4321)] == 1000.0


def test_numbers_that_json_lacks_are_gaps(site: Site) -> None:
    id = site.add_experiment(trials=1, reports=0)
    (trial,) = site.trials(id)
    site.report(id, trial, (1, 1.0), (2, float("nan")), (3, float("inf")), (4, 2.0))
    (curve,) = json.loads(site.ask(f"/trials/{trial}/curves").text)["panels"][0]["curves"]
    assert curve["y"] == [1.0, None, None, 2.0]


def test_trials_as_csv(site: Site, search: int) -> None:
    answer = site.ask(f"/experiments/{search}/trials.csv")
    header, *rows = csv.reader(io.StringIO(answer.text))
    assert header[:4] == ["trial", "state", "validated at step", "best loss"]
    assert [(row[0], row[3]) for row in rows] == [(str(id), str(n / 4)) for n, id in enumerate(site.trials(search), 1)]
    assert dict(zip(header, rows[0], strict=True))["net.width"] == "8"


@pytest.mark.parametrize(
    "path",
    [
        "/experiments/9999",
        "/trials/9999",
        f"/experiments/{'9' * 5000}",
        "/trials/999999999999999999",
        "/experiments/9999/curves",
        "/nothing",
        "/static/x",
    ],
)
def test_what_is_not_there(site: Site, path: str) -> None:
    assert site.ask(path).status == 404


def test_missing_experiment_is_named(site: Site) -> None:
    assert "there is no experiment 9999" in site.ask("/experiments/9999").text


def test_run_of_a_script_is_shown(site: Site) -> None:
    run = tracking.RunDescription(
        name="a script", config=None, hparams={}, seed=1, entrypoint="train.py", torch_version=None,
        resolute_version="1", git_commit=None, pid=1, process_started=1.0, host="elsewhere",
    )  # fmt: skip
    with tracking.TrialWriter.start(site.home.database, run) as recorder:
        recorder.write([tracking.MetricReport(group="training", steps_completed=1, metrics={"loss": 2.0}, time=1.0)])
        id, trial = recorder.experiment_id, recorder.trial_id
    assert "A script writes to its own terminal" in site.ask(f"/trials/{trial}").text
    assert 'data-post="' not in site.ask(f"/experiments/{id}").text
    assert site.ask(f"/trials/{trial}/curves").data["panels"][0]["curves"][0]["y"] == [2.0]
