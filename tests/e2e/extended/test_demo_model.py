"""The demo model's converter, and the folder that it made."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_rotary_rows_are_put_in_halves(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    fetch = importlib.import_module("fetch_demo_model")
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
