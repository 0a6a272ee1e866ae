"""The report of a real run: the command, and its page in headless Chromium."""

from __future__ import annotations

import json

import pytest

from rollout.report import write_report
from rollout.types import SamplingParams
from tests.helpers.browser import Tab, browser
from tests.helpers.run_logs import learned_line
from tests.helpers.small_jobs import run, small_job

ATTACK = "</script><script>document.title = 'taken'</script><img src=x onerror='document.title=1'>"


@pytest.fixture(scope="module")
def log(tiny_model_path, tmp_path_factory):
    """The log of a job on the tiny model, with what a longer one would have learned, and with a
    rollout whose text is an attack."""
    folder = tmp_path_factory.mktemp("run")
    prompts = [{"prompt": [5 + i, 6, 7]} for i in range(6)]
    params = SamplingParams(temperature=0.6, max_new_tokens=40, n=4, seed=3)
    config = small_job(tiny_model_path, folder, prompts, params)
    run(config, "ngram")
    path = folder / "rollouts.jsonl.log"
    with path.open("a") as file:
        file.write(json.dumps(learned_line()) + "\n")
    output = folder / "rollouts.jsonl"
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    output.write_text("".join(json.dumps(row | {"prompt": ATTACK}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tab(log, tmp_path_factory):
    """The log's page, opened."""
    page, _ = write_report([log])
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        tab.emulate(1280, 900)
        tab.open(page.as_uri())
        tab.wait_for("location.protocol === 'file:' && document.readyState === 'complete'")
        yield tab
        assert tab.complaints == []


def cells(tab: Tab, table: str, column: str) -> list[str]:
    """The texts of a column, in the order they are shown."""
    return tab.evaluate(f"""(() => {{
        const table = document.querySelector("#{table} table");
        const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
        const at = names.indexOf("{column}");
        return [...table.tBodies].map((body) => body.rows[0].cells[at].textContent);
    }})()""")


def click(tab: Tab, selector: str) -> None:
    tab.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


def test_what_the_page_shows(tab, log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rollouts = [line for line in lines if line["kind"] == "rollout"]
    figures = tab.text("#figures")
    assert f"{sum(r['generated_tokens'] for r in rollouts):,}" in figures
    assert "speedup" in tab.text(".verdict")
    assert tab.evaluate("document.querySelectorAll('.verdict .share').length") == 6
    assert len(cells(tab, "rollouts", "tokens")) == len(rollouts)
    assert len(cells(tab, "prompts", "prompt")) == 6
    drawn = "[...document.querySelectorAll('svg.chart')].map((svg) => svg.children.length > 3)"
    assert tab.evaluate(drawn) == [True] * tab.evaluate("document.scripts.length - 2")
    assert tab.evaluate("document.querySelectorAll('#over_time polyline').length") >= 3


def test_rollouts_open_and_are_only_text(tab):
    assert tab.evaluate("document.querySelector('#rollouts .opened').hidden")
    click(tab, "#rollouts td button")
    assert not tab.evaluate("document.querySelector('#rollouts .opened').hidden")
    assert tab.text("#rollouts .opened pre") == ATTACK
    assert tab.evaluate("document.images.length") == 0
    assert "report of one run" in tab.evaluate("document.title")
    click(tab, "#rollouts td button")
    assert tab.evaluate("document.querySelector('#rollouts .opened').hidden")
