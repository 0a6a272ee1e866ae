"""Reading prompts: every kind of prompt, every way a row can be broken."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.errors import InvalidInputError
from rollout.offline.config import DataConfig
from rollout.offline.prompts import BrokenRow, PromptFile, PromptRow

CHAT = [{"role": "user", "content": "hi"}]


def read(path: Path, **options: Any) -> list[PromptRow | BrokenRow]:
    with PromptFile(DataConfig(path=str(path), **options), path.parent) as file:
        return list(file.rows())


def write_lines(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    encoded = [line.encode() if isinstance(line, str) else line for line in lines]
    path.write_bytes(b"\n".join(encoded))
    return path


def test_each_kind_of_prompt_and_its_extras(tmp_path):
    path = write_lines(
        tmp_path,
        json.dumps({"prompt": "text as it stands ", "answer": {"value": [1, None]}}),
        "",
        json.dumps({"id": "é", "messages": CHAT}),
        json.dumps({"token_ids": [3, 0, 7]}),
        json.dumps({"prompt": None, "text": "other column"}),
    )
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    rows = read(path)
    assert rows == [
        PromptRow(0, "line 1", "prompt", "text as it stands ", {"answer": {"value": [1, None]}}),
        PromptRow(1, "line 3", "messages", CHAT, {"id": "é"}),
        PromptRow(2, "line 4", "token_ids", [3, 0, 7], {}),
        PromptRow(3, "line 5", "text", "other column", {}),
    ]


BROKEN: tuple[tuple[str | bytes, str], ...] = (
    ('{"prompt": "cut off', "not JSON"),
    ('["a list"]', "not an object"),
    ("{}", "has no prompt"),
    ('{"answer": 3}', r"its columns \(answer\); name the right one with data.prompt_column"),
    ('{"prompt": ""}', "prompt is empty"),
    ('{"prompt": []}', "prompt is empty"),
    ('{"prompt": 7}', "of type int"),
    ('{"prompt": {"role": "user"}}', "of type dict"),
    ('{"prompt": [1, -2]}', "holds -2"),
    ('{"prompt": [1, true]}', "holds True"),
    ('{"prompt": [1, "two"]}', "holds 'two'"),
    ('{"messages": [{"role": "user"}]}', "message 1 needs a text 'content'"),
    ('{"messages": [{"role": "user", "content": [{}]}]}', "message 1 needs a text 'content'"),
    ('{"messages": [{"role": "user", "content": "x"}, 3]}', "message 2 is not an object"),
    ('{"prompt": "half of \\ud83d"}', "surrogate"),
    (b'{"prompt": "\xff"}', "not UTF-8"),
    ("[" * 100_000, "cannot be read as JSON|nested"),
    ('{"prompt": [' + "1" * 5000 + "]}", "cannot be read as JSON"),
)


def test_a_broken_line_is_named_and_the_rest_is_read(tmp_path):
    good = '{"prompt": "good"}'
    for line, reason in BROKEN:
        _, broken, after = read(write_lines(tmp_path, good, line, good))
        assert isinstance(broken, BrokenRow), line[:40]
        assert broken.where == "line 2"
        assert re.search(reason, broken.reason), line[:40]
        assert after == PromptRow(2, "line 3", "prompt", "good", {})  # as if line 2 were whole


def test_options(tmp_path):
    row = {"prompt": "a", "question": "b", "x": 1, "y": None}
    path = write_lines(tmp_path, *[json.dumps(row)] * 3)
    first, second = read(path, prompt_column="question", columns=["y"], limit=2)
    assert first == PromptRow(0, "line 1", "question", "b", {"y": None})
    assert second.index == 1
    (lacking, *_) = read(path, columns=["z"])
    assert "lacks z" in lacking.reason
    (nameless, *_) = read(path, prompt_column="nope")
    assert "none of nope" in nameless.reason


def test_parquet_keeps_types(tmp_path):
    path = tmp_path / "prompts.parquet"
    day = datetime.date(2024, 5, 17)
    messages = [{"role": "system", "content": "s", "name": None}, *CHAT]
    table = {"messages": [messages, CHAT], "day": [day, None], "raw": [b"\x00", b""]}
    pq.write_table(pa.table(table), path)
    first, second = read(path)
    assert first.where == "row 1"
    assert first.prompt == [{"role": "system", "content": "s"}, *CHAT]  # null: not there
    assert first.extras == {"day": day, "raw": b"\x00"}
    assert second.index == 1

    # Beyond one batch:
    pq.write_table(pa.table({"input_ids": [[i] for i in range(2500)]}), path)
    assert [row.prompt for row in read(path)] == [[i] for i in range(2500)]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidInputError, match=r"data.path='nowhere.jsonl': there is no such"):
        PromptFile(DataConfig(path="nowhere.jsonl"), tmp_path)
    with pytest.raises(InvalidInputError, match=r"must end in .jsonl or .parquet"):
        DataConfig(path="prompts.csv")
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 and no more")
    with pytest.raises(InvalidInputError, match="cannot be read as Parquet"):
        read(torn)
