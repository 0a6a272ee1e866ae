"""The status page shows a working server, in headless Chromium."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator

import pytest

from rollout import RolloutEngine
from tests.helpers.browser import Tab, browser
from tests.server.conftest import Live, post

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


def test_numbers_change_while_requests_run(live, tab):
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
    assert re.search("\N{PLUS-MINUS SIGN}|too few steps", tab.text("#saved small"))
    assert tab.evaluate("document.querySelectorAll('#values tbody tr').length") > 0
    assert tab.complaints == []
    asked = tab.evaluate("performance.getEntriesByType('resource').map((e) => e.name)")
    assert set(asked) == {f"{live.url}/status"}


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


def test_the_docs_need_no_other_server(live, tab):
    tab.complaints.clear()
    tab.open(f"{live.url}/docs")
    tab.wait_for("document.querySelectorAll('.opblock').length > 20")
    sources = tab.evaluate(
        "[...document.querySelectorAll('[src],link[href]')].map(e => e.src || e.href)"
    )
    assert all(source.startswith(live.url) for source in sources)
    assert not tab.complaints
