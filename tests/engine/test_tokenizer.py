"""`PromptEncoder` on texts whose special tokens are written out."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rollout.engine.tokenizer import PromptEncoder
from tests.helpers.text_model import byte_tokenizer


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    """Of a tokenizer that puts `<s>` before every text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    return PromptEncoder(wrapped, len(wrapped))


def test_text_that_begins_with_bos_gets_no_second_one(encoder: PromptEncoder) -> None:
    plain = encoder.encode("two")
    assert plain.count(plain[0]) == 1
    assert len(plain) == 4
    assert encoder.encode("<s>two") == plain
    assert encoder.encode("<s><s>two") == [plain[0], *plain]  # those of the text stay
    assert encoder.encode("<s>") == plain[:1]


def test_a_tokenizer_without_bos_keeps_what_the_text_says() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    encoder = PromptEncoder(wrapped, len(wrapped))
    bos = wrapped.bos_token_id
    assert encoder.encode("<s><s>a")[:2] == [bos, bos]
