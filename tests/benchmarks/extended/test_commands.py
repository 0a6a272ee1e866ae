"""Command lines of benchmarks, and measurements that are fair."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from harness import rows
from harness.command import Command

ROOT = Path(__file__).parents[3]


def test_commands_of_the_documentation_are_understood() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.py")]
    pattern = re.compile(r"python3? benchmarks/((?:bench|profile)\w+)\.py([^`#\n]*)")
    found = set()
    for page in pages:
        for name, given in pattern.findall(page.read_text()):
            for option in re.findall(r"\[([^]]*)\]", given) or [given]:
                arguments = shlex.split(option.replace("...", "").split("|")[0])
                if "FILE[=BAR]" not in given:
                    importlib.import_module(name).make_command().parse(arguments)
                    found.add(name)
    assert len(found) > 9


def test_an_error_in_one_part_loses_no_row_of_another(tmp_path: Path, capsys) -> None:
    command = Command("made")
    command.option("--tokens", 96, quick=4)
    path = tmp_path / "rows.jsonl"

    def failing():
        yield rows.row("first", 1, "")
        raise RuntimeError("later")

    def parts(options):
        return {"good": lambda: [rows.row(f"{options.tokens}", 2, "")], "bad": failing}

    with pytest.raises(RuntimeError, match="later"):
        command.run("", parts, ["--quick", "--json", str(path)])
    assert [each["name"] for each in rows.read_records(path)] == ["4", "first"]
    with pytest.raises(SystemExit):
        command.run("", parts, ["--only", "other"])
    assert "--only other: must be in one of: good; bad" in capsys.readouterr().err
