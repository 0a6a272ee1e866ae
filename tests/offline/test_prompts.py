"""Reading prompts: every kind of prompt, every way a row can be broken."""

from __future__ import annotations

import datetime
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from rollout.errors import InvalidInputError
from rollout.offline.config import DataConfig
from rollout.offline.prompts import BrokenRow, PromptFile, PromptRow

CHAT = [{"role": "user", "content": "hi"}]


def read(path: Path, **options: Any) -> list[PromptRow | BrokenRow]:
    return list(PromptFile(DataConfig(path=str(path), **options)).rows())


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
        PromptFile(DataConfig(path="nowhere.jsonl"))
    with pytest.raises(InvalidInputError, match=r"must end in .jsonl, .json, .parquet, "):
        DataConfig(path="prompts.csv")
    for name, content, reason in UNREADABLE:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(InvalidInputError, match=f"{name}'.*{reason}"):
            read(path)
    with pytest.raises(InvalidInputError, match=r"data.split='train': .* has no such parts"):
        read(write_lines(tmp_path, "{}"), split="train")


UNREADABLE = (
    ("torn.parquet", b"PAR1 and no more", "cannot be read as Parquet"),
    ("torn.json", b'[{"prompt": "a"}, ', "cannot be read as JSON: Expecting value: line 1"),
    ("torn.jsonl.gz", gzip.compress(b"{}" * 99)[:-9], "cannot be read as gzip: Compressed file"),
    ("plain.jsonl.gz", b"{}", "cannot be read as gzip: Not a gzipped file"),
)


def test_a_list_of_json_and_compressed_lines(tmp_path):
    items = [{"prompt": "a\nb", "n": 1}, 3, {"messages": CHAT}]
    lines = [json.dumps(item) for item in items]
    for name, content, noun in (
        ("list.json", "\ufeff " + json.dumps(items, indent=2), "row"),
        ("lines.json", "\n".join(lines), "row"),
        ("lines.jsonl.gz", "\n".join(lines), "line"),
    ):
        path = tmp_path / name
        data = content.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        first, broken, last = read(path)
        assert first == PromptRow(0, f"{noun} 1", "prompt", "a\nb", {"n": 1})
        assert broken.where == f"{noun} 2"
        assert last.prompt == CHAT


def test_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    splits = {
        name: Dataset.from_list([{"question": text, "answer": 7}])
        for name, text in (("train", "one"), ("test", "two"))
    }
    files, both, single = (tmp_path / name for name in ("questions.parquet", "both", "single"))
    files.mkdir()
    for name, dataset in splits.items():
        dataset.to_parquet(files / f"{name}.parquet")
    DatasetDict(splits).save_to_disk(both)
    splits["train"].save_to_disk(single)
    one = [PromptRow(0, "row 1", "question", "one", {"answer": 7})]
    assert read(files) == read(both) == read(single) == one
    assert [row.prompt for row in read(files, split="test")] == ["two"]
    for options, reason in (
        ({"split": "dev"}, "data.path=.* cannot be loaded as a dataset: .*Unknown split"),
        ({"name": "main"}, "data.path=.* cannot be loaded as a dataset: .*'main' not found"),
    ):
        with pytest.raises(InvalidInputError, match=reason):
            read(files, **options)
    with pytest.raises(InvalidInputError, match=r"data.split='test': .* has no such parts"):
        read(single, split="test")
    with pytest.raises(InvalidInputError, match=r"data.path='no/where': is no file, and cannot be"):
        PromptFile(DataConfig(path="no/where"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'specrollout\[data\]'"):
        read(files)
