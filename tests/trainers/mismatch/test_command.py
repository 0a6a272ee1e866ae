"""The command, its page and its refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rollout import cli
from rollout.errors import InvalidInputError
from rollout.trainers.mismatch import compare
from rollout.trainers.mismatch.command import run_mismatch
from rollout.trainers.mismatch.page import mismatch_page
from tests.helpers.planted_faults import planted
from tests.trainers.mismatch.conftest import Pair


@pytest.fixture
def rows(windowed: Pair, tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    names = ("prompt_ids", "token_ids", "logprobs", "weight_versions")
    path.write_text(
        "".join(
            json.dumps({name: getattr(rollout, name) for name in names}) + "\n"
            for rollout in windowed.sampled
        )
    )
    return path


def test_the_command_names_the_cause_and_writes_both_files(
    windowed: Pair, rows: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    json_file, page = tmp_path / "found.json", tmp_path / "found.html"
    arguments = ["mismatch", str(windowed.folder), str(rows), "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["specrollout", *arguments, "--json", str(json_file)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "no suspect" in capsys.readouterr().out
    found = json.loads(json_file.read_text())
    assert (found["suspects"], found["tokens"], len(found["ops"])) == ([], 120, 40)
    more = ["--trainer-dtype", "bfloat16", "--html", str(page)]
    assert run_mismatch([*arguments[1:], *more]) == 1
    assert "dtype: model is in bfloat16, the engine's in float32" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_the_log_beside_the_rollouts_says_the_temperature(
    windowed: Pair, rows: Path, capsys
) -> None:
    log = rows.with_name(f"{rows.name}.log")
    lines = [{"kind": "run", "time": 1.0, "temperature": 0.5}, {"kind": "step", "step": 1}]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [str(windowed.folder), str(rows), "--dtype", "float32"]
    assert run_mismatch(arguments) == 1
    assert "of temperature 1, and compared at 0.5" in " ".join(capsys.readouterr().out.split())
    assert run_mismatch([*arguments, "--temperature", "1"]) == 0


def test_parquet_is_read_as_jsonl_is_and_exact_training_shows_zero(
    windowed: Pair, rows: Path, capsys
) -> None:
    arrow = pytest.importorskip("pyarrow.json")
    other = rows.with_suffix(".parquet")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.read_json(rows), other)
    assert run_mismatch([str(windowed.folder), str(other), "--dtype", "float32", "--exact"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rollouts, tokens 4, 120 " in shown
    assert "logits of all tokens, every row: largest 0 " in shown
    assert "\x1b" not in shown


def test_the_page_has_a_cell_for_each_op_and_layer(windowed: Pair) -> None:
    model = windowed.model()
    with planted("mask", model):
        found = compare(model, windowed.engine, windowed.sampled)
    html = mismatch_page(found, "a/model").decode()
    charts = [part.split("</script>")[0] for part in html.split('type="application/json">')[1:]]
    heat, ratios, positions = map(json.loads, charts)
    [counts], (means, largest) = ratios["lines"], positions["lines"]
    assert sum(count for _, count in counts["points"]) == found.tokens
    assert len(means["points"]) == len(largest["points"]) == len(found.by_position)
    explained, unexplained = heat["cells"]
    assert len(explained["points"]) + len(unexplained["points"]) == len(found.ops)
    [[column, row, tip, opacity]] = unexplained["points"]
    assert (heat["x"]["names"][column], heat["y"]["names"][row]) == ("0", "self_attn.attention")
    assert "rounding explains" in tip
    assert opacity == 1
    assert "mask: layers.0.self_attn.attention differs by" in html


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, r"rollouts\[0\].prompt_ids=\[\]: is missing: write it with output"),
        ({"token_ids": []}, r"rollouts\[0\].token_ids=\[\]: must have a token"),
        ({"token_ids": [97]}, r"rollouts\[0\]=97: tokens must be integers in \[0, 97\)"),
        ({"prompt_ids": ["a"]}, r"rollouts\[0\]='a': tokens must be integers"),
        ({"prompt_ids": [1] * 512}, r"rollouts\[0\]=513: tokens must fit the context of 512"),
        ({"logprobs": [0.0, 0.0]}, r"rollouts\[0\].logprobs=2: values must be as many as the 1"),
        (None, r"rollouts=\[\]: must have at least one rollout"),
    ],
)
def test_rollouts_with_other_values_are_refused(windowed: Pair, change, message) -> None:
    row = {"prompt_ids": [1], "token_ids": [2]}
    with pytest.raises(InvalidInputError, match=message):
        compare(windowed.model(), windowed.engine, [] if change is None else [row | change])


def test_other_faults_of_the_input_are_refused(windowed: Pair, tmp_path: Path) -> None:
    model, rows = windowed.model(), windowed.sampled
    with pytest.raises(InvalidInputError, match="engine='Pair': must be a RolloutEngine"):
        compare(model, windowed, rows)
    with pytest.raises(InvalidInputError, match="left_padding=-1"):
        compare(model, windowed.engine, rows, left_padding=-1)
    with pytest.raises(InvalidInputError, match="model='Embedding': must be a transformers"):
        compare(model.model.embed_tokens, windowed.engine, rows)
    with pytest.raises(InvalidInputError, match="model='Qwen3Model': must be a transformers"):
        compare(model.model, windowed.engine, rows)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("[1]\n")
    with pytest.raises(InvalidInputError, match=r"ROLLOUTS=.*line 1.: is no JSON object"):
        run_mismatch([str(windowed.folder), str(bad)])
    with pytest.raises(InvalidInputError, match="--count=0"):
        run_mismatch([str(windowed.folder), str(bad), "--count", "0"])
    for given in (bad, tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(InvalidInputError, match=r"--json=.*must name a file of its own"):
            run_mismatch([str(windowed.folder), str(bad), "--json", str(given)])
    assert bad.read_text() == "[1]\n"
