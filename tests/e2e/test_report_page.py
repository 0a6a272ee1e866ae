"""The page of a real run, opened in headless Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rollout.cli import main
from rollout.config import DType, MemoryConfig, ModelConfig, SchedulerConfig
from rollout.engine.worker import worker_factory
from rollout.offline import DataConfig, LogConfig, OutputConfig, RunConfig, run_job
from rollout.types import SamplingParams
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.run_logs import learned_line

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
SECTIONS = ("accept_length", "tail", "cost", "calibration", "time", "lengths", "forecast")


@pytest.fixture(scope="module")
def log(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a job on the tiny model, with what a longer one would have learned."""
    folder = tmp_path_factory.mktemp("run")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": [5 + i, 6, 7]}) + "\n" for i in range(6)))
    config = RunConfig(
        model=ModelConfig(path=str(tiny_model_path), dtype=DType.float32),
        data=DataConfig(path=str(prompts)),
        sampling=SamplingParams(temperature=0.6, max_new_tokens=40, n=4, seed=3),
        output=OutputConfig(path=str(folder / "rollouts.jsonl")),
        log=LogConfig(jsonl=str(folder / "run.jsonl")),
        memory=MemoryConfig(max_kv_tokens=1024),
        scheduler=SchedulerConfig(max_running=8, max_step_tokens=64, chunk_len=16),
        num_threads=1,
    )
    run_job(config, worker_factory("ngram"))
    path = folder / "run.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(learned_line()) + "\n")
    return path


@pytest.fixture(scope="module")
def page(log: Path) -> Path:
    arguments = [sys.executable, "-m", "rollout.cli", "report", str(log)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    shown = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert shown.returncode == 0, shown.stderr
    page = log.with_suffix(".report") / "index.html"
    assert shown.stdout.startswith(f"wrote {page} and ")
    return page


def chromium(address: str, folder: Path, *arguments: str) -> str:
    """What it prints. Nothing of the page may be said to be wrong."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
        "--enable-logging=stderr", "--virtual-time-budget=10000", f"--user-data-dir={folder}",
        *arguments, address,
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert shown.returncode == 0, shown.stderr
    assert "CONSOLE" not in shown.stderr, shown.stderr
    return shown.stdout


class PageReader(HTMLParser):
    """Ids, text of the figures, and rows of each sortable table."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.plots = ""
        self.num_images = 0
        self.rows: dict[str, list[list[str]]] = {}
        self.sorted_by: list[tuple[str, str]] = []
        self.figures: list[str] = []
        self._table = ""
        self._cell: list[str] | None = None
        self._sort = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given["id"]} if "id" in given else set()
        self.plots = given.get("data-plots", self.plots)
        self.num_images += tag == "img"
        if tag == "table":
            self._table = given.get("data-name", "figures")
            self.rows[self._table] = []
        elif tag == "tr":
            self.rows[self._table].append([])
        elif tag in ("td", "th"):
            self._cell = []
            self._sort = given.get("aria-sort", "")

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            text = "".join(self._cell).strip()
            self.rows[self._table][-1].append(text)
            if self._sort:
                self.sorted_by.append((text, self._sort))
            self._cell = None

    def column(self, table: str, name: str) -> list[str]:
        header, *rows = self.rows[table]
        return [row[header.index(name)] for row in rows]


def test_the_page_of_a_run_in_a_browser(page: Path, log: Path, tmp_path: Path) -> None:
    shown = PageReader(chromium(page.as_uri(), tmp_path / "user", "--dump-dom"))
    assert set(SECTIONS) | {"figures", "slowest", "groups", "values", "learned"} <= shown.ids
    pngs = sorted(path.stem for path in page.parent.glob("*.png"))
    assert {"accept_length", "tail", "cost", "calibration", "time", "lengths"} <= set(pngs)
    assert shown.num_images == len(pngs)
    assert shown.plots == f"{len(pngs)}/{len(pngs)}"  # decoded, as the page's script found
    figures = dict(shown.rows["figures"])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rollouts = [line for line in lines if line["kind"] == "rollout"]
    assert figures["rollouts"].startswith(f"{len(rollouts)} (")
    assert figures["generated tokens"] == f"{sum(r['generated_tokens'] for r in rollouts):,}"
    assert len(shown.column("slowest", "tokens")) == len(rollouts)
    assert len(shown.column("groups", "prompt")) == 6


@pytest.mark.parametrize("direction", ["ascending", "descending"])
def test_tables_sort(page: Path, tmp_path: Path, direction: str) -> None:
    address = f"{page.as_uri()}#sort=slowest/tokens/{direction}"
    shown = PageReader(chromium(address, tmp_path / "user", "--dump-dom"))
    lengths = [int(text) for text in shown.column("slowest", "tokens")]
    assert lengths == sorted(lengths, reverse=direction == "descending")
    assert len(set(lengths)) > 1
    assert shown.sorted_by == [("tokens", direction)]


@pytest.mark.parametrize(("clicks", "direction"), [(1, "descending"), (2, "ascending")])
def test_a_click_sorts(page: Path, tmp_path: Path, clicks: int, direction: str) -> None:
    button = "document.querySelector('table[data-name=groups] th:nth-child(3) button')"
    script = f"<script>for (let i = 0; i < {clicks}; i++) {button}.click();</script></body>"
    clicked = tmp_path / "clicked.html"
    clicked.write_text(page.read_text().replace("</body>", script))
    shown = PageReader(chromium(clicked.as_uri(), tmp_path / "user", "--dump-dom"))
    assert shown.sorted_by == [("mean tokens", direction)]
    means = [float(text) for text in shown.column("groups", "mean tokens")]
    assert means == sorted(means, reverse=direction == "descending")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_readers_colours(page: Path, tmp_path: Path, scheme: str) -> None:
    picture = tmp_path / "page.png"
    preferred = {"dark": 0, "light": 1}[scheme]
    chromium(
        page.as_uri(), tmp_path / "user", f"--screenshot={picture}", "--window-size=1200,1800",
        f"--blink-settings=preferredColorScheme={preferred}",
    )  # fmt: skip
    from matplotlib.image import imread

    brightness = imread(picture)[..., :3].mean(axis=(1, 2))
    assert brightness.shape == (1800,)
    assert brightness.std() > 0.005  # not blank
    # Half of the rows are mostly background, those with a plot among them.
    middle = sorted(brightness)[900]
    assert middle < 0.3 if scheme == "dark" else middle > 0.85


def test_the_command(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["specrollout", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    code, out, _ = run("report", "--help")
    assert code == 0
    assert "RUN.jsonl" in out
    assert "--output" in out
    assert re.search(r"specrollout report RUN.jsonl", run("--help")[1])
    assert run("report")[0] == 2
    assert run("report", str(log), "--colour")[0] == 2
    code, out, err = run("report", str(tmp_path / "nowhere.jsonl"))
    assert (code, out) == (2, "")
    assert err.startswith("error: log=")
    assert "there is no such file" in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
