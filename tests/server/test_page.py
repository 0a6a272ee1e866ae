"""The status page over a working server, in headless Chromium, and the JSON it is made of."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator

import pytest

from rollout import RolloutEngine
from tests.helpers.browser import Tab, browser
from tests.server.conftest import Live, OpenServer, post
from tests.server.fresh_status import fresh_status

SHOWN = "document.querySelector('#running')?.textContent"
POLLS = "performance.getEntriesByType('resource').filter((e) => e.name.endsWith('/status')).length"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


def open_page(tab: Tab, live: Live) -> None:
    tab.complaints.clear()
    tab.emulate(1200, 1600)
    tab.evaluate("window.isFormer = true")
    tab.open(live.url)
    here = f"!window.isFormer && location.href.startsWith({json.dumps(live.url)})"
    tab.wait_for(f"{here} && document.readyState === 'complete'")  # its script has run


def generate(live: Live, tokens: int, samples: int = 4) -> None:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.7, "n": samples}
    with live.client() as client:
        post(client, "/generate", input_ids=[5, 6, 7], sampling_params=params | {"seed": 1})


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_numbers_change_while_requests_run(live, tab, tmp_path):
    open_page(tab, live)
    tab.wait_for(SHOWN)
    assert tab.text("#state") == "idle"
    generated = number(tab.text("#generated"))
    stop = threading.Event()

    def keep_generating() -> None:
        while not stop.is_set():
            generate(live, 200)

    thread = threading.Thread(target=keep_generating)
    thread.start()
    try:
        tab.wait_for("document.querySelector('#state').textContent === 'generating'")
        tab.wait_for("Number(byId('running').textContent) > 0")
        tab.wait_for(f"Number(byId('generated').textContent.replace(/,/g, '')) > {generated}")
        tab.wait_for("Number(byId('rate').textContent) > 0")
        tab.wait_for("document.querySelector('#rate-chart polyline') !== null")
        tab.wait_for("document.querySelector('#cost-chart .dot') !== null")
    finally:
        stop.set()
        thread.join()
    live.wait_until_idle()
    total = live.serving.loop.call(lambda engine: engine.metrics()).result()
    shown = "Number(byId('generated').textContent.replace(/,/g, ''))"
    tab.wait_for(f"{shown} === {total.generated_tokens}")
    tab.wait_for("byId('state').textContent === 'idle'")
    assert tab.evaluate("byId('accept').firstChild.data") == f"{total.accept_length:.2f}"
    assert "other samples of the prompt" in tab.text("#values tbody")
    assert "group" not in tab.text("#values tbody")
    for tile in ("first-token", "per-token"):
        assert tab.evaluate(f"byId('{tile}').firstChild.data.endsWith('s')")
    assert "\N{PLUS-MINUS SIGN}" in tab.text("#saved")
    picture = tmp_path / "page.png"
    tab.screenshot(picture)
    assert picture.stat().st_size > 10_000
    assert tab.complaints == []


def test_a_reload_keeps_the_history(live, tab):
    open_page(tab, live)
    tab.wait_for("samples.length > 2")
    first = tab.evaluate("samples[0].time")
    open_page(tab, live)
    tab.wait_for("samples.length > 0")
    assert tab.evaluate("samples[0].time") == first
    # One that another life of the server left is not gone on with.
    tab.evaluate("""addEventListener("pagehide", () => {
        const left = JSON.parse(sessionStorage.getItem(HISTORY));
        left.samples = [{ ...samples[0], time: samples[0].time - 60 }];
        sessionStorage.setItem(HISTORY, JSON.stringify(left));
    })""")
    open_page(tab, live)
    tab.wait_for("samples.length > 0")
    assert tab.evaluate("samples[0].time") > first


@pytest.mark.parametrize(
    ("saved", "error", "shown"),
    [
        (
            3.0,
            1.0,
            ["3.0 \N{PLUS-MINUS SIGN} 1.0 s", "1.30 \N{PLUS-MINUS SIGN} 0.10 times as fast"],
        ),
        (0.5, 1.0, ["0.5 \N{PLUS-MINUS SIGN} 1.0 s", "no difference can be told"]),
    ],
)
def test_time_saved_has_its_error(live, tab, saved, error, shown):
    open_page(tab, live)
    tab.wait_for(SHOWN)
    total = "{ drafted: 9, forecast_steps: 9, total_ms: 10000 }"
    body = (
        f"{{ engine: {{ total: {total} }}, saved_seconds: {saved}, saved_error_seconds: {error} }}"
    )
    assert tab.evaluate(f"saved({body})") == shown


def test_the_cost_curve_is_drawn_where_it_was_measured(live, tab):
    open_page(tab, live)
    tab.wait_for(SHOWN)
    drawn = tab.evaluate("""(() => {
        const cost = { contexts: [256, 512], rows: [1, 2, 4, 8],
            milliseconds: [[10, 11, 12, 13], [20, 21, 22, 23]],
            observations: [[0, 3, 2, 0], [0, 0, 0, 0]] };
        const last_step = { query_tokens: 0, forward_ms: 0 };
        showCost({ engine: { learned: { budget: { cost } }, replicas: {}, last_step } });
        const charted = byId("cost-chart");
        const corners = [...charted.querySelectorAll("polyline")].map((line) => line.points.length);
        return [corners, charted.querySelectorAll(".dot").length];
    })()""")
    assert drawn == [[2], 2]


def test_it_says_why_nothing_runs(live, tab):
    open_page(tab, live)
    tab.wait_for(SHOWN)
    live.serving.loop.call(lambda engine: engine.pause_generation()).result()
    try:
        tab.wait_for("byId('state').dataset.state === 'stopped'")
        assert "continue_generation" in tab.text("#reason")
    finally:
        live.serving.loop.call(lambda engine: engine.continue_generation()).result()
    tab.wait_for("byId('state').dataset.state === 'idle'")
    assert tab.evaluate("byId('reason').hidden")


def test_names_are_text(live, tab):
    name = '<img src="x" onerror="document.title=1"> & "docs"'

    def add(engine: RolloutEngine) -> None:
        engine.add_external_corpus(name, token_chunks=[[5, 6, 7, 8] * 50], wait=True)

    live.serving.loop.call(add).result()
    try:
        open_page(tab, live)
        tab.wait_for("byId('corpora').querySelectorAll('tbody tr').length === 1")
        assert tab.text("#corpora tbody td") == name
        assert tab.evaluate("document.images.length") == 0
    finally:
        live.serving.loop.call(lambda engine: engine.remove_external_corpus(name)).result()


def test_replicas_are_rows(live, tab):
    """The page is told of two: they look like the engine itself."""
    open_page(tab, live)
    tab.wait_for(SHOWN)
    rows = tab.evaluate("""fetch("status").then((answer) => answer.json()).then((body) => {
        const replica = { ...body.engine };
        const other = { ...replica, running: 3, unavailable_reason: "the replica starts" };
        body.engine.replicas = { "replica-0": replica, "replica-1": other };
        show(body);
        const rows = [...byId("replicas").querySelectorAll("tbody tr")];
        return rows.map((row) => [...row.cells].slice(0, 3).map((cell) => cell.textContent));
    })""")
    assert rows == [["replica-0", "ready", "0"], ["replica-1", "the replica starts", "3"]]


def test_it_fits_a_phone(live, tab):
    open_page(tab, live)
    tab.emulate(360, 800, "dark")
    tab.wait_for(SHOWN)
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"


def test_a_hidden_page_asks_nothing(live, tab):
    open_page(tab, live)
    tab.wait_for(SHOWN)
    polls = tab.evaluate(
        """Object.defineProperty(document, "hidden", { get: () => window.away ?? true });
        document.dispatchEvent(new Event("visibilitychange"));"""
        + POLLS
    )
    tab.wait_for(f"{POLLS} > {polls}")  # one was under way
    tab.evaluate("new Promise((resolve) => setTimeout(resolve, 2500))")
    assert tab.evaluate(POLLS) == polls + 1
    tab.evaluate('window.away = false; document.dispatchEvent(new Event("visibilitychange"))')
    tab.wait_for(f"{POLLS} > {polls} + 2")


def test_it_asks_for_the_key(open_server, tab):
    live = open_server(api_key="the-key")
    with live.client() as client:
        page = client.get("/")
        assert (page.status_code, client.get("/status").status_code) == (200, 401)
        assert "the-key" not in page.text
    open_page(tab, live)
    tab.wait_for("!byId('key-form').hidden")
    assert tab.evaluate("byId('content').hidden")
    give_key(tab, "another")
    tab.wait_for("byId('state').textContent === 'the key was refused'")
    give_key(tab, "the-key")
    tab.wait_for(SHOWN)
    assert tab.evaluate("byId('key-form').hidden && byId('key').value === ''")
    assert tab.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [
        1, 0, "",
    ]  # fmt: skip
    tab.evaluate("byId('forget').click()")
    tab.wait_for("!byId('key-form').hidden && byId('content').hidden")
    assert tab.evaluate("sessionStorage.length") == 0


def give_key(tab: Tab, key: str) -> None:
    tab.evaluate(f"byId('key').value = '{key}'; byId('key-form').requestSubmit()")


def test_it_asks_nobody_else(live, tab):
    with live.client() as client:
        page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert len(page.content) < 50_000
    open_page(tab, live)
    tab.wait_for(SHOWN)
    asked = tab.evaluate("performance.getEntriesByType('resource').map((e) => e.name)")
    assert set(asked) == {f"{live.url}/status"}
    refused = tab.evaluate("""new Promise((resolve) => {
        document.addEventListener("securitypolicyviolation", (e) => resolve(e.effectiveDirective));
        fetch("http://127.0.0.1:9/").catch(() => {});
    })""")
    assert refused == "connect-src"
    refused = tab.evaluate("""new Promise((resolve) => {
        document.addEventListener("securitypolicyviolation", (e) => resolve(e.effectiveDirective));
        const script = document.createElement("script");
        script.textContent = "document.title = 'taken'";
        document.body.append(script);
    })""")
    assert refused == "script-src-elem"
    assert tab.evaluate("document.title") != "taken"


def test_a_clock_that_is_set_back_does_not_turn_the_uptime_back(live, monkeypatch):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 7200)
    with live.client() as client:
        assert 0 < client.get("/status").json()["uptime"] < 3600


def test_status_is_json_that_every_reader_takes(live):
    generate(live, 40)
    live.wait_until_idle()
    with live.client() as client:
        fresh_status(client)
        answer = client.get("/status")
    body = json.loads(answer.text, parse_constant=pytest.fail)
    engine = body["engine"]
    assert body["model"] == live.serving.model_name
    assert (body["unfinished"], body["draining"]) == (0, False)
    assert 0 < body["uptime"] < 3600
    assert (engine["running"], engine["waiting"], engine["unavailable_reason"]) == (0, 0, "")
    assert engine["weight_versions"] == {"target": 0}
    assert engine["total"]["generated_tokens"] >= 160
    cost = engine["learned"]["budget"]["cost"]
    assert len(cost["milliseconds"]) == len(cost["contexts"])
    assert all(math.isfinite(each) for row in cost["milliseconds"] for each in row)


def test_numbers_that_are_none(open_server: OpenServer, tab: Tab) -> None:
    """Without speculation nothing is learned, and before the first token there are no rates."""
    live = open_server(engine={"spec": "none"})
    open_page(tab, live)
    tab.wait_for(SHOWN)
    assert tab.evaluate("byId('cost').hidden && byId('values').hidden && byId('corpora').hidden")
    assert tab.evaluate("byId('accept').firstChild.data") == "\u2013"
    assert "NaN" not in tab.text("main")
    assert tab.complaints == []
