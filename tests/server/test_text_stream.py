"""Streamed text is the rollout's text, whatever the tokens and the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rollout.engine.requests import RequestFactory
from rollout.engine.token_text import Detokenizer, TokenText
from rollout.engine.tokenizer import PromptEncoder
from rollout.server.text_stream import TextStream
from rollout.types import SamplingParams
from tests.helpers.text_model import byte_tokenizer

TEXTS = (
    "Hello there, how are you?",
    "naïve café: 你好世界。今日は良い天気ですね。",
    "👩‍👩‍👧‍👦 family 🇩🇪🇫🇷 flags 🏳️‍🌈 and 🤷🏽‍♀️!",
    "a\ufffdb\ufffd\ufffd c\ufffd",
    "do n't ' stop ' me 've . Now ! x ' ' y 's .",
    "  spaces   and\n\n\tnewlines  ",
    "STOSTOP here STOP",
    "한국어와 العربية and עברית",
)
WORDS = ["Hello", "▁there", "▁", "▁▁", "STO", "P", "STOP", "é", "▁'", "▁.", "n't", "\ufffd", "▁n"]


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: pieces with ▁ for a space, bytes for what has no piece, special
    tokens."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizer(
        models.BPE({name: id for id, name in enumerate(names)}, [], byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def word_piece_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like BERT's: continuations with ##, spaces taken from before punctuation."""
    names = ["[UNK]", "[SEP]", "do", "n", "'", "##t", "t", "m", "##m", ".", "!", ",", "s", "ve",
             "##ve", "n't", "'s", "STO", "##P", "P", "x"]  # fmt: skip
    tokenizer = Tokenizer(
        models.WordPiece({name: id for id, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:2]])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece("##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        sep_token="[SEP]",
        clean_up_tokenization_spaces=True,
    )


@pytest.fixture(
    scope="module",
    params=["demo model", byte_fallback_tokenizer, word_piece_tokenizer],
    ids=lambda made: made if isinstance(made, str) else made.__name__,
)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if callable(request.param):
        return request.param()
    folder: Path = request.getfixturevalue("demo_model_path")
    return AutoTokenizer.from_pretrained(folder)


@st.composite
def token_lists(draw: st.DrawFn, tokenizer: Any) -> list[int]:
    """Texts and their parts, with any tokens between them."""
    any_token = st.integers(0, len(tokenizer) - 1)
    special = st.sampled_from(tokenizer.all_special_ids)
    encoded = st.sampled_from(TEXTS).map(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    )
    noise = st.lists(any_token | special, max_size=6)
    return [token for part in draw(st.lists(encoded | noise, max_size=6)) for token in part]


def chunks(draw: st.DrawFn, tokens: Sequence[int]) -> list[Sequence[int]]:
    """The tokens as steps may emit them: from one to many at once."""
    sizes = st.sampled_from([1, 1, 1, 2, 3, 5, 30])
    parts = []
    while tokens:
        size = draw(sizes)
        parts.append(tokens[:size])
        tokens = tokens[size:]
    return parts


def run_request(
    tokenizer: Any, parts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[str], str, str]:
    """The pieces of a request that samples these tokens, its text, and what came with its end."""
    encoder = PromptEncoder(tokenizer, len(tokenizer))
    factory = RequestFactory(encoder, len(tokenizer), (), lambda request, field: None)
    request = factory.make([0], params)
    stream = TextStream(Detokenizer(tokenizer), params.stop)
    pieces = []
    for part in parts:
        kept, request.finish_reason = request.stop_check.first_stop(request, part)
        request.tokens += part[:kept]
        pieces.append(stream.push(part[:kept]))
        if request.finish_reason is not None:
            break
    text = factory.rollout(request).text
    assert text is not None
    return pieces, text, stream.finish(text)


@given(data=st.data(), stops=st.booleans())
@settings(max_examples=70, deadline=None, derandomize=True)
def test_pieces_make_up_the_text_before_the_stop_string(
    tokenizer: Any, data: st.DataObject, stops: bool
) -> None:
    tokens = data.draw(token_lists(tokenizer))
    params = SamplingParams(max_new_tokens=10**6)
    if stops:
        text = tokenizer.decode(tokens, skip_special_tokens=True) or "x"
        start = data.draw(st.integers(0, len(text) - 1))
        of_text = text[start : start + data.draw(st.integers(1, 5))]
        strings = st.sampled_from(["STOP", " ", "\ufffd", "'", of_text])
        params = SamplingParams(
            max_new_tokens=10**6,
            stop=data.draw(st.lists(strings, min_size=1)),
            min_new_tokens=data.draw(st.integers(0, 8)),
        )
    parts = data.draw(st.composite(chunks)(tokens))
    pieces, text, rest = run_request(tokenizer, parts, params)
    assert "".join(pieces) + rest == text


def test_only_an_unfinished_character_waits() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="</s>")
    tokens = tokenizer("".join(TEXTS))["input_ids"]
    tokens += tokens[1::2]  # and what is no character
    text = TokenText(Detokenizer(tokenizer))
    shown = ""
    for end, token in enumerate(tokens, start=1):
        shown += text.push([token])
        assert shown == tokenizer.decode(tokens[:end]).removesuffix("\ufffd")


@pytest.mark.parametrize(
    ("make_tokenizer", "stop", "tokens", "pieces"),
    [
        # An invalid byte spoils the characters before it in its run
        (byte_fallback_tokenizer, [], ["Hello", "<0xC3>", "<0xA9>", "<0xFF>", "P"],
         ["Hello", "", "", "", "\ufffd\ufffd\ufffdP"]),
        # A space waits for a token that may take it away
        (word_piece_tokenizer, [], ["do", "'", "m", "x", "n", "s"],
         ["do", "", "'m", "", "", " x"]),
        # A stop string that stopped nothing is shown with the next token
        (byte_fallback_tokenizer, ["STOP"], ["Hello", "STO", "P", "n't"],
         ["Hello", "", "", "STOPn't"]),
    ],
)  # fmt: skip
def test_uncertain_text_waits(
    make_tokenizer: Any, stop: list[str], tokens: list[str], pieces: list[str]
) -> None:
    tokenizer = make_tokenizer()
    stream = TextStream(Detokenizer(tokenizer), stop)
    assert [stream.push([id]) for id in tokenizer.convert_tokens_to_ids(tokens)] == pieces
    assert stream.finish("".join(pieces) + "more") == "more"
