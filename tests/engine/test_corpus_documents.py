"""Every source of documents gives the same arrays, lazily, and names what cannot be used."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from rollout.engine.corpus_documents import FileDocuments, documents_from
from rollout.engine.tokenizer import PromptEncoder
from rollout.errors import InvalidInputError
from tests.helpers.text_model import save_text_model

TEXTS = ["one two three", "", "nine  eight", "seven word20 zero one"]


@pytest.fixture(scope="module")
def encoder(text_model_path):
    return PromptEncoder.from_pretrained(text_model_path, 97)


def flat(source):
    return [array.tolist() for batch in source for array in batch]


def test_all_sources_give_the_same(encoder, tmp_path):
    chunks = [encoder.encode(text) for text in TEXTS if text]
    file = tmp_path / "documents.jsonl"
    lines = [
        json.dumps(TEXTS[0]),
        json.dumps({"text": TEXTS[1]}),
        "",
        json.dumps({"title": 3, "text": TEXTS[2]}) + "\r",
        json.dumps(TEXTS[3]),  # the last line need not end
    ]
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    assert flat(documents_from(encoder, documents=TEXTS)) == chunks
    assert flat(documents_from(encoder, file_path=file)) == chunks
    as_arrays = [np.array(chunks[0], np.uint8), tuple(chunks[1]), [], chunks[2]]
    source = documents_from(encoder, token_chunks=as_arrays)
    assert flat(source) == chunks
    for batch in documents_from(encoder, token_chunks=as_arrays):
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in batch)


def test_no_special_tokens(tmp_path):
    """A tokenizer that begins every prompt with a token of its own."""
    folder = save_text_model(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "</s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
    }
    tokenizer["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    encoder = PromptEncoder.from_pretrained(folder, 97)
    assert flat(documents_from(encoder, documents=["one two three"])) == [[7, 8, 9]]
    assert encoder.encode("one")[0] == 2


def test_a_file_is_read_as_it_is_iterated(encoder, tmp_path):
    file = tmp_path / "documents.jsonl"
    line = json.dumps("one two three four " * 5000) + "\n"
    file.write_text(line * 20)
    source = FileDocuments(encoder, file)
    fractions = [source.fraction_read()]
    for batch in source:
        assert sum(map(len, batch)) <= 1 << 17
        fractions.append(source.fraction_read())
    assert len(fractions) >= 6
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert 0 < fractions[1] < 0.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'text': 3}", r":3=.*is not JSON \(Expecting property name.*must be a JSON string"),
        (b'{"text": 3}', r":3=\{'text': 3\}: must be a JSON string or an object with a text under"),
        (b'{"body": "one"}', r":3=\{'body': 'one'\}: must be a JSON string or an object"),
        (b'["one"]', r":3=\['one'\]: must be a JSON string"),
        (b"null", r":3=None: must be a JSON string"),
        (b'"one \xff two"', r":3=b'\"one .{4} two\"': is not UTF-8"),
        (b'"\\ud800"', r":3='.ud800': holds half of a surrogate pair"),
        (b"[" * 100_000, r":3=.*is not JSON"),
    ],
)
def test_bad_lines_are_named(encoder, tmp_path, line, message):
    file = tmp_path / "documents.jsonl"
    file.write_bytes(b'"one"\n\n' + line + b'\n"two"\n')
    with pytest.raises(InvalidInputError, match="documents.jsonl" + message):
        flat(FileDocuments(encoder, file))


def test_a_line_without_end_is_refused_before_it_is_read(encoder, tmp_path):
    file = tmp_path / "documents.jsonl"
    with file.open("wb") as sparse:
        sparse.write(b'"one"\n"two ')
        sparse.truncate(1 << 40)
    message = r"documents.jsonl:2=b'\"two .*: is longer than 67108864 bytes: split the line"
    with pytest.raises(InvalidInputError, match=message):
        flat(FileDocuments(encoder, file))


def test_the_longest_line_is_read(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.engine.corpus_documents._MAX_LINE_BYTES", 6)
    (tmp_path / "documents.jsonl").write_text('"one"\n"two"')
    assert len(flat(FileDocuments(encoder, tmp_path / "documents.jsonl"))) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, r"documents, token_chunks, file_path=\[\]: give exactly one"),
        ({"documents": ["a"], "token_chunks": [[1]]}, r"=\['documents', 'token_chunks'\]: give"),
        ({"documents": "one text"}, r"documents='one text': must be a list of documents"),
        ({"documents": 3}, r"documents=3: must be a list"),
        ({"documents": []}, r"documents='empty': must hold at least one token"),
        ({"documents": ["", ""]}, r"documents='empty': must hold at least one token"),
        ({"documents": ["one", 3]}, r"documents\[1\]=3: must be text"),
        ({"documents": ["\ud800"]}, r"documents\[0\]=.*half of a surrogate pair"),
        ({"token_chunks": ["one"]}, r"token_chunks\[0\]='one': must be a sequence of integers"),
        ({"token_chunks": [[1], 3]}, r"token_chunks\[1\]=3: must be a flat sequence of integers"),
        ({"token_chunks": [[1], [97]]}, r"token_chunks\[1\]=97: token ids must be in \[0, 97\)"),
        ({"token_chunks": [[3, -1]]}, r"token_chunks\[0\]=-1: token ids must be in"),
        ({"token_chunks": [[2**80]]}, r"token_chunks\[0\]=.*must be a flat sequence of integers"),
        ({"token_chunks": [[2**63]]}, r"token_chunks\[0\]=9223372036854775808: token ids"),
        ({"token_chunks": [[1.5]]}, r"token_chunks\[0\]=\[1.5\]: must be a flat sequence"),
        ({"token_chunks": [[True]]}, r"token_chunks\[0\]=\[True\]: must be a flat sequence"),
        ({"token_chunks": [[[1]]]}, r"token_chunks\[0\]=.*: must be a flat sequence"),
        ({"token_chunks": [[1, [2]]]}, r"token_chunks\[0\]=.*: must be a flat sequence"),
        ({"file_path": "/nowhere/x.jsonl"}, r"file_path='/nowhere/x.jsonl': there is no such file"),
        ({"file_path": "/"}, r"file_path='/': there is no such file"),
    ],
)
def test_bad_sources_are_named(encoder, source, message):
    with pytest.raises(InvalidInputError, match=message):
        flat(documents_from(encoder, **source))


def test_an_empty_file(encoder, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(InvalidInputError, match=r"empty.jsonl='empty': must hold at least one"):
        flat(FileDocuments(encoder, tmp_path / "empty.jsonl"))


def test_text_needs_a_tokenizer(tmp_path):
    encoder = PromptEncoder(None, 97)
    (tmp_path / "one.jsonl").write_text('"one"')
    for source in ({"documents": ["one"]}, {"file_path": tmp_path / "one.jsonl"}):
        with pytest.raises(
            InvalidInputError, match=f"{next(iter(source))}=.*one.*: .*no tokenizer"
        ):
            documents_from(encoder, **source)
    assert flat(documents_from(encoder, token_chunks=[[1, 2]])) == [[1, 2]]


def test_two_threads_encode_while_a_third_decodes(encoder):
    sources = [documents_from(encoder, documents=["one two three " * 50] * 300) for _ in range(2)]
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda source=source: results.append(sum(map(len, flat(source)))))
        for source in sources
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert encoder.decode([7, 8]) == "one two"
        assert encoder.encode("one two") == [7, 8]
    assert results == [300 * 150] * 2
