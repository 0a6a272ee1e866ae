"""Every source of documents gives the same arrays, lazily, and names what cannot be used."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

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


def test_no_special_tokens_and_no_truncation(tmp_path):
    """The tokenizer begins every prompt with a token of its own, and cuts it."""
    folder = save_text_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = {"single": "</s> $A", "special_tokens": [("</s>", 2)]}
    tokenizer.post_processor = processors.TemplateProcessing(**template)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(folder / "tokenizer.json"))
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


LINES = (
    (b"{'text': 3}", "is not JSON"),
    (b"[" * 100_000, "is not JSON"),
    (b'{"text": 3}', "must be a JSON string or an object with a text under"),
    (b'{"body": "one"}', "must be a JSON string"),
    (b'["one"]', "must be a JSON string"),
    (b'"one \xff two"', "is not UTF-8"),
    (b'"\\ud800"', "holds half of a surrogate pair"),
)


def test_bad_lines_are_named(encoder, tmp_path):
    file = tmp_path / "documents.jsonl"
    for line, message in LINES:
        file.write_bytes(b'"one"\n\n' + line + b'\n"two"\n')
        with pytest.raises(InvalidInputError, match=message) as refused:
            flat(FileDocuments(encoder, file))
        assert refused.value.field == f"{file}:3", line


SOURCES = (
    ({}, "documents, token_chunks, file_path"),
    ({"documents": ["a"], "token_chunks": [[1]]}, "documents, token_chunks, file_path"),
    ({"documents": "one text"}, "documents"),
    ({"documents": 3}, "documents"),
    ({"documents": ["", ""]}, "documents"),
    ({"documents": ["one", 3]}, "documents[1]"),
    ({"documents": ["\ud800"]}, "documents[0]"),
    ({"token_chunks": ["one"]}, "token_chunks[0]"),
    ({"token_chunks": [[1], 3]}, "token_chunks[1]"),
    ({"token_chunks": [[1], [97]]}, "token_chunks[1]"),
    ({"token_chunks": [[3, -1]]}, "token_chunks[0]"),
    ({"token_chunks": [[2**80]]}, "token_chunks[0]"),
    ({"token_chunks": [[2**63]]}, "token_chunks[0]"),
    ({"token_chunks": [[True]]}, "token_chunks[0]"),
    ({"token_chunks": [[[1]]]}, "token_chunks[0]"),
    ({"token_chunks": [[1, [2]]]}, "token_chunks[0]"),
    ({"file_path": "/nowhere/x.jsonl"}, "file_path"),
    ({"file_path": "/"}, "file_path"),
)


def test_bad_sources_are_named(encoder, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    for source, field in (*SOURCES, ({"file_path": empty}, str(empty))):
        with pytest.raises(InvalidInputError) as refused:
            flat(documents_from(encoder, **source))
        assert refused.value.field == field, source


def test_text_needs_a_tokenizer(tmp_path):
    encoder = PromptEncoder(None, 97)
    (tmp_path / "one.jsonl").write_text('"one"')
    for source in ({"documents": ["one"]}, {"file_path": tmp_path / "one.jsonl"}):
        with pytest.raises(
            InvalidInputError, match=f"{next(iter(source))}=.*one.*: .*no tokenizer"
        ):
            documents_from(encoder, **source)
    assert flat(documents_from(encoder, token_chunks=[[1, 2]])) == [[1, 2]]
