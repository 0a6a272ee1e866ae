"""The demo model's converter: the GGUF reader on files made here, and the converted folder."""

from __future__ import annotations

import importlib
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def examples(monkeypatch):
    """Imports an example by name, as when it is run as a script."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    loaded: list[str] = []

    def load(name):
        loaded.append(name)
        return importlib.import_module(name)

    yield load
    for name in loaded:
        sys.modules.pop(name, None)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def q4_1(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Random Q4_1 blocks and what they stand for, one weight after the other."""
    packed = b""
    values = np.zeros(rows * columns, dtype=np.float32)
    for start in range(0, rows * columns, 32):
        scale, minimum = rng.standard_normal(2).astype(np.float16)
        quants = rng.integers(0, 16, 32)
        packed += scale.tobytes() + minimum.tobytes()
        packed += bytes(int(quants[i] | quants[i + 16] << 4) for i in range(16))
        values[start : start + 32] = np.float32(scale) * quants + np.float32(minimum)
    return packed, values.reshape(rows, columns)


def q8_0(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    packed = b""
    values = np.zeros(rows * columns, dtype=np.float32)
    for start in range(0, rows * columns, 32):
        scale = np.float16(rng.standard_normal())
        quants = rng.integers(-128, 128, 32).astype(np.int8)
        packed += scale.tobytes() + quants.tobytes()
        values[start : start + 32] = np.float32(scale) * quants
    return packed, values.reshape(rows, columns)


def gguf(metadata: bytes, num_keys: int, tensors: list[tuple[str, int, tuple[int, int], bytes]],
         alignment: int = 32) -> bytes:  # fmt: skip
    infos, data = b"", b""
    for name, type_id, (rows, columns), packed in tensors:
        data += bytes(-len(data) % alignment)
        infos += string(name) + struct.pack("<IQQIQ", 2, columns, rows, type_id, len(data))
        data += packed
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), num_keys) + metadata + infos
    return head + bytes(-len(head) % alignment) + data


def test_the_reader_gives_back_what_was_packed(tmp_path, examples):
    rng = np.random.default_rng(0)
    four, eight = q4_1(rng, 3, 64), q8_0(rng, 2, 96)
    plain = rng.standard_normal((5, 7)).astype(np.float32)
    metadata = string("name") + struct.pack("<I", 8) + string("tiny é")
    metadata += string("count") + struct.pack("<II", 4, 77)
    metadata += string("flag") + struct.pack("<I?", 7, True)
    metadata += string("sizes") + struct.pack("<IIQ", 9, 11, 2) + struct.pack("<qq", -1, 2)
    metadata += string("words") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("")
    metadata += string("general.alignment") + struct.pack("<II", 4, 64)
    path = tmp_path / "tiny.gguf"
    tensors = [("f", 0, (5, 7), plain.tobytes()), ("four", 3, (3, 64), four[0]),
               ("eight", 8, (2, 96), eight[0])]  # fmt: skip
    path.write_bytes(gguf(metadata, 6, tensors, alignment=64))
    file = examples("gguf_reader").GgufFile(path)
    assert file.metadata == {
        "name": "tiny é",
        "count": 77,
        "flag": True,
        "sizes": [-1, 2],
        "words": ["a", ""],
        "general.alignment": 64,
    }
    read = dict(file.tensors())
    for name, expected in (("f", plain), ("four", four[1]), ("eight", eight[1])):
        np.testing.assert_array_equal(read[name], expected)


def test_the_reader_refuses_what_it_does_not_know(tmp_path, examples):
    reader, path = examples("gguf_reader"), tmp_path / "tiny.gguf"
    for content, says in (
        (gguf(b"", 0, [("blk.0.x", 14, (1, 32), b"")]), "blk.0.x is of ggml type 14"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"PK\x03\x04", "not a GGUF file"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=says):
            list(reader.GgufFile(path).tensors())


def test_rotary_rows_are_put_in_halves(examples):
    fetch = examples("fetch_demo_model")
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    # GGUF row order of each head of 6 rows: (0, 3), (1, 4), (2, 5).
    head = [0, 3, 1, 4, 2, 5]
    weight = np.array([*head, *(6 + row for row in head)], dtype=np.float32)[:, None]
    halves = fetch.unpermuted("blk.0.attn_q.weight", weight, config)
    assert halves[:, 0].tolist() == list(range(12))
    np.testing.assert_array_equal(fetch.unpermuted("blk.0.attn_v.weight", weight, config), weight)


def test_the_converted_tokenizer_and_answer(demo_model_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_path)
    assert tokenizer("x  5")["input_ids"] == [104, 256, 37]  # digits apart, spaces together
    assert tokenizer("2024")["input_ids"] == [34, 32, 34, 36]
    for text in ("Hello world's 123\n\n  x", "日本 émoji 🎉", "def f(x):\n\treturn x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model_path)
    output = model.generate(**chat, do_sample=False, max_new_tokens=12)
    answer = tokenizer.decode(output[0, chat["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    assert "Apache" in (demo_model_path / "LICENSE").read_text()
    assert "dequantised" in (demo_model_path / "NOTICE").read_text()
