"""Installs, images, the workflow and the page on installing agree with the package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("rollout", "spec_workers", "ngram_native")
EXTRAS = set(PROJECT["project"]["optional-dependencies"])
IMAGES = sorted((ROOT / "docker").iterdir())
WORKFLOW = ROOT / ".github" / "workflows" / "package.yml"
INSTALL = ROOT / "docs" / "index.md"


def test_torch_is_the_one_that_is_tested():
    tested = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in (*IMAGES, WORKFLOW, INSTALL):
        assert set(re.findall(r"torch==[\d.]+\d", path.read_text())) == {tested[1]}, path.name


def test_the_promised_pythons_are_those_that_the_workflow_uses():
    named = [each.rpartition(" :: ")[2] for each in PROJECT["project"]["classifiers"]]
    assert (
        yaml.safe_load(WORKFLOW.read_text())["jobs"]["use"]["strategy"]["matrix"]["python"] == named
    )
    for path in (INSTALL, ROOT / "README.md", ROOT / "docs" / "troubleshooting.md"):
        assert f"Python {named[0]} to {named[-1]}" in path.read_text(), path.name


def test_an_editable_install_brings_the_three_packages_and_no_other_folder(tmp_path):
    """Folders around the clone and in it do not take the place of a user's, which lack __init__."""
    folders = {each.name for each in ROOT.iterdir() if each.is_dir() and "." not in each.name}
    others = folders - set(PACKAGES) | {ROOT.name}
    for name in others:
        (tmp_path / name).mkdir()
    script = (
        "import sys; from importlib.util import find_spec\n"
        "for name in sys.argv[1:]: print(*(find_spec(name).submodule_search_locations or []))"
    )
    command = [sys.executable, "-c", script, *others]
    found = subprocess.run(
        command, cwd=tmp_path, env={}, capture_output=True, text=True, check=True
    )
    theirs = {str(ROOT), *(str(ROOT / name) for name in others)}
    assert not theirs & set(found.stdout.split())


def test_images_ask_for_extras_that_exist_and_every_extra_is_explained():
    for path in IMAGES:
        (asked,) = re.findall(r"^ARG EXTRAS=(\S+)$", path.read_text(), re.MULTILINE)
        assert set(asked.split(",")) <= EXTRAS, path.name
    assert sorted(re.findall(r"^\| `(\w+)`", INSTALL.read_text(), re.MULTILINE)) == sorted(EXTRAS)


def test_images_are_sent_all_that_the_wheel_is_made_of():
    sent = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    scikit = PROJECT["tool"]["scikit-build"]
    needed = {*scikit["wheel"]["packages"].values(), "CMakeLists.txt", "pyproject.toml"}
    needed |= {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert set(sent) == needed


def test_the_workflow_publishes_nothing_that_was_not_tested():
    workflow = yaml.safe_load(WORKFLOW.read_text())
    jobs = workflow["jobs"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert [job for job in jobs if "id-token" in jobs[job].get("permissions", {})] == ["publish"]
    for job in jobs.values():
        for step in job["steps"]:
            for script in re.findall(r"\.ci/[\w.]+", step.get("run", "")):
                assert (ROOT / script).exists()
