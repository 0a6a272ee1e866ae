"""The harness: rows that survive, options of quick runs, and comparisons that are fair."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
from harness import rows
from harness.command import POSITIVE, Command
from harness.timing import in_turns, paired


def test_rows_are_in_the_file_as_they_come_and_survive_a_torn_line(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.jsonl"
    with rows.finishing("", path) as found:
        found.extend(rows.row(name, 1, "ms") for name in "ab")
        assert [record["name"] for record in rows.read_records(path)] == ["a", "b"]
    with path.open("a") as file:
        file.write('{"name": "tor')
    rows.finish("", [rows.not_run("c", "ms")], path)
    assert [record["name"] for record in rows.read_records(path)] == ["a", "b", "c"]
    assert "line 3: torn" in capsys.readouterr().out


def test_a_bar_is_the_least_or_the_largest_good_value() -> None:
    judged = [rows.row("", value, "", 2.0, at_most=at_most).ok
              for value in (1.0, 2.0, 3.0) for at_most in (False, True)]  # fmt: skip
    assert judged == [False, True, True, True, True, False]
    assert rows.row("", 1.0, "").ok
    assert rows.not_run("", "", 2.0).ok is None


ROOT = Path(__file__).parents[2]


def command() -> Command:
    made = Command("made")
    made.option("--tokens", 96, quick=4, limits=POSITIVE)
    made.option("--batch", [1, 8], quick=[2], nargs="+", limits=POSITIVE)
    made.option("--share", 0.5, limits=(0, 1))
    return made


def test_a_quick_run_takes_quick_defaults_unless_others_are_given(capsys) -> None:
    usual, quick = command().parse([]), command().parse(["--quick", "--tokens", "7"])
    assert (usual.tokens, usual.batch, usual.share) == (96, [1, 8], 0.5)
    assert (quick.tokens, quick.batch, quick.share) == (7, [2], 0.5)
    usual.batch.append(9)
    assert command().parse([]).batch == [1, 8]
    for wrong in (["--tokens", "0"], ["--batch", "1", "-3"], ["--share", "nan"], ["--tokens", "x"]):
        with pytest.raises(SystemExit):
            command().parse(wrong)
    assert "--share=nan: must be in [0, 1]" in capsys.readouterr().err


def test_parts_are_chosen_by_name_and_what_was_found_before_an_error_is_kept(
    tmp_path: Path, capsys
) -> None:
    path = tmp_path / "rows.json"

    def failing():
        yield rows.row("first", 1, "")
        raise RuntimeError("later")

    def parts(options):
        return {"good part": lambda: [rows.row(f"{options.tokens}", 2, "")], "bad part": failing}

    command().run("{tokens} tokens", parts, ["--only", "good", "--json", str(path)])
    assert [each["name"] for each in json.loads(path.read_text())] == ["96"]
    assert "96 tokens" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="later"):
        command().run("", parts, ["--json", str(path)])
    assert [each["name"] for each in json.loads(path.read_text())] == ["96", "first"]
    with pytest.raises(SystemExit):
        command().run("", parts, ["--only", "other"])
    assert "good part; bad part" in capsys.readouterr().err


def test_a_missing_file_is_told_as_the_command_lines_fault(capsys) -> None:
    def parts(options):
        raise FileNotFoundError("no draft there; `make demo-draft`")

    with pytest.raises(SystemExit):
        command().run("", parts, [])
    assert "make demo-draft" in capsys.readouterr().err


def test_calls_take_turns_and_warm_ones_do_not_count() -> None:
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    seconds = in_turns(calls, 3, warm=1)
    assert "".join(called) == "abcbcacababc"
    assert [len(seconds[name]) for name in "abc"] == [3, 3, 3]


def test_ratios_are_of_pairs() -> None:
    # The machine ran at a third of its speed in the second pair; the ratios stay.
    assert paired([2.0, 6.0, 3.0], [1.0, 3.0, 2.0]) == 2.0
    assert paired([1.0, 3.0], [2.0, 6.0]) == 0.5
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0], [1.0])


def test_the_commands_of_the_documentation_are_understood() -> None:
    """Each is parsed by the benchmark it names; those of a session on a GPU have their own test."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.py")]
    pattern = re.compile(r"python3? benchmarks/((?:bench|profile|simulate)\w+)\.py([^`#\n]*)")
    found = set()
    for page in pages:
        for name, given in pattern.findall(page.read_text()):
            for option in re.findall(r"\[([^]]*)\]", given) or [given]:
                arguments = shlex.split(option.replace("...", "").split("|")[0])
                if "FILE[=BAR]" not in given:
                    importlib.import_module(name).make_command().parse(arguments)
                    found.add(name)
    assert len(found) > 12
