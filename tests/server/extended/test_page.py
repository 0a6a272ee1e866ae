"""The status page shows a working server, in headless Chromium."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from rollout import RolloutEngine
from tests.helpers.browser import Tab, browser
from tests.server.conftest import Live, OpenServer, post

SHOWN = "document.querySelector('#running')?.textContent"


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
    asked = tab.evaluate("performance.getEntriesByType('resource').map((e) => e.name)")
    assert set(asked) == {f"{live.url}/status"}


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


def test_it_asks_for_the_key(open_server, tab):
    live = open_server(api_key="the-key")
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


def test_numbers_that_are_none(open_server: OpenServer, tab: Tab) -> None:
    """Nothing is learned without speculation, and there are no rates before the first token."""
    live = open_server(engine={"spec": "none"})
    open_page(tab, live)
    tab.wait_for(SHOWN)
    assert tab.evaluate("byId('cost').hidden && byId('values').hidden && byId('corpora').hidden")
    assert tab.evaluate("byId('accept').firstChild.data") == "\u2013"
    assert "NaN" not in tab.text("main")
    assert tab.complaints == []
