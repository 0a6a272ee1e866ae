"""README.md and docs/*.md: links lead somewhere, commands and keys exist, Python code parses."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from rollout.cli import SUBCOMMANDS
from rollout.config import KEY_OF
from rollout.engine.worker_factory import factory_of
from rollout.offline.command_line import hydra_arguments, keys_of
from rollout.offline.compare.command import compare_options
from rollout.offline.config import RunConfig
from rollout.offline.hydra_config import register_schema
from rollout.server.config import ServeConfig
from rollout.trainers.mismatch.command import mismatch_parser
from spec_workers.draft_training.arguments import train_draft_parser
from tests.helpers.config_keys import key_defaults
from tests.helpers.text_model import save_text_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose_of(page: Path) -> str:
    """The page without its blocks of code."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = sum(words == re.sub(r"-\d+$", "", each) for each in anchors)
        anchors.add(f"{words}-{number}" if number else words)
    return anchors


def test_links_lead_to_a_file_and_a_heading():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{name_of(page)}: {target}: there is no such file"
            known = not anchor or anchor in anchors_of(file)
            assert known, f"{name_of(page)}: {target}: there is no such heading"


def test_python_code_parses():
    for page in PAGES:
        for language, code in CODE.findall(page.read_text(encoding="utf-8")):
            if language == "python":
                ast.parse(code, filename=name_of(page))


def test_the_first_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_text_model(tmp_path / "models" / "SmolLM2-135M-Instruct")
    blocks = [code for language, code in CODE.findall(PAGES[0].read_text()) if language == "python"]
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})


def commands() -> Iterator[Any]:
    """The arguments of every `specrollout` in the blocks of code."""
    for page in PAGES:
        for language, code in CODE.findall(page.read_text(encoding="utf-8")):
            if language == "python":
                continue
            for line in code.replace("\\\n", " ").splitlines():
                if found := re.search(r"(?:^|\s)specrollout (.+?)(?: &)?$", line):
                    given = shlex.split(re.sub(r"\$\(\(.*?\)\)", "1", found[1]), comments=True)
                    yield pytest.param(given, id=f"{name_of(page)}: {' '.join(given)}")


@pytest.fixture
def composing():
    register_schema("run_schema", RunConfig)
    register_schema("serve_schema", ServeConfig)
    with initialize_config_module("rollout.conf", version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize("given", list(commands()))
def test_commands_are_understood(given):
    """Commands parse, and their keys compose: all that can be told before a file is read."""
    command, arguments = (given[0], given[1:]) if given[0] in SUBCOMMANDS else ("", given)
    if arguments == ["--help"] or command == "report":
        return
    if command == "train-draft":
        train_draft_parser().parse_args(arguments)
        return
    if command == "mismatch":
        mismatch_parser().parse_args(arguments)
        return
    if command == "compare":
        arguments = compare_options(arguments).overrides
    kind = ServeConfig if command == "serve" else RunConfig
    translated = hydra_arguments(arguments, kind)
    overrides = [each for each in translated if re.match(r"\+?[\w.]+=", each)]
    if "-m" in translated:  # one of each list; options that all kinds have
        lists = [each for each in overrides if "," in each]
        if any(each.startswith("spec=") for each in lists):
            overrides = [each for each in overrides if not each.startswith("spec.")]
        overrides = [each.partition(",")[0] if each in lists else each for each in overrides]
    if overrides:
        factory_of(compose("serve" if command == "serve" else "config", overrides=overrides).spec)


@pytest.mark.usefixtures("composing")
def test_keys_in_the_text_exist():
    known = {*keys_of(RunConfig), *keys_of(ServeConfig)}
    specs = [path.stem for path in (ROOT / "conf" / "spec").glob("*.yaml")]
    known |= {
        f"spec.{key}"
        for spec in specs
        for key in compose("config", overrides=[f"spec={spec}"]).spec
    }
    sections = "|".join({key.partition(".")[0] for key in known if "." in key})
    pattern = re.compile(rf"`\+?((?:{sections})\.[a-z_]+)[`=]")
    for page in PAGES:
        named = {key for key in pattern.findall(prose_of(page)) if not key.endswith(".py")}
        assert named <= known, f"{name_of(page)}: there are no keys {named - known}"


@pytest.mark.usefixtures("composing")
def test_the_page_of_keys_has_every_key_with_its_default():
    text = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text, re.MULTILINE)) == key_defaults()


def test_the_page_on_moving_names_what_stands_for_a_key():
    text = (ROOT / "docs" / "moving.md").read_text(encoding="utf-8")
    for name, key in KEY_OF.items():
        assert re.search(rf"(`|--){name}.*`{key}|--{name.replace('_', '-')}.*`{key}", text), name
