"""Prompts become token ids: special tokens, chat templates, and texts too long to encode."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from rollout.engine.chat_template import ChatTemplate
from rollout.engine.min_token_count import MinTokenCount
from rollout.engine.tokenizer import PromptEncoder
from rollout.errors import InvalidInputError
from tests.helpers.text_model import byte_tokenizer


@pytest.fixture(scope="module")
def with_bos():
    """An encoder of a tokenizer that puts `<s>` before every text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    return PromptEncoder(wrapped, len(wrapped))


def test_text_that_begins_with_bos_gets_no_second_one(with_bos):
    plain = with_bos.encode("two")
    assert plain.count(plain[0]) == 1
    assert len(plain) == 4
    assert with_bos.encode("<s>two") == plain
    assert with_bos.encode("<s><s>two") == [plain[0], *plain]  # those of the text stay
    assert with_bos.encode("<s>") == plain[:1]
    assert with_bos.encode("two", add_special_tokens=False) == plain[1:]
    assert with_bos.encode("<s>two", add_special_tokens=False) == plain
    assert with_bos.encode_rendered("two") == plain[1:]
    for rendered in ("two", "<s>two"):
        assert with_bos.encode_rendered(rendered, add_special_tokens=True) == plain


USER = {"role": "user", "content": "one"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
OBJECTS = (
    "{{ messages[1].content }}{% for c in messages[1].tool_calls %}"
    "{{ c.function.arguments | tojson }}{% endfor %}"
)
TEXTS = (
    "{{ messages[1]['content'] + '' }}{% for c in messages[1]['tool_calls'] %}"
    "{{ '```' + c['function']['arguments'] + '```' }}{% endfor %}"
)


@pytest.fixture
def encoder(text_model_path):
    return PromptEncoder.from_pretrained(text_model_path, 97)


def with_template(encoder: PromptEncoder, template: Any) -> ChatTemplate:
    encoder.tokenizer.chat_template = template
    return encoder.chat_template


def calling(arguments: object, **fields: object) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "tool_calls": [call], **fields}]


@pytest.mark.parametrize("fields", [{}, {"content": None}])
@pytest.mark.parametrize("arguments", ['{"a":1}', {"a": 1}])
def test_arguments_are_what_the_template_takes(encoder, arguments, fields):
    messages = calling(arguments, **fields)
    template = with_template(encoder, OBJECTS)
    assert template.render(messages, "messages") == '{"a": 1}'
    assert messages == calling(arguments, **fields), "the caller's messages were changed"
    for none in ("", None):
        assert template.render(calling(none), "messages") == "{}"
    as_text = ChatTemplate(encoder.tokenizer)
    encoder.tokenizer.chat_template = TEXTS
    text = arguments if isinstance(arguments, str) else '{"a": 1}'
    assert as_text.render(messages, "messages") == f"```{text}```"


def test_tools_pick_the_template(encoder):
    template = with_template(
        encoder, {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    )
    assert template.render([USER], "messages") == "plain"
    assert template.render([USER], "messages", tools=TOOLS) == "f"
    assert "tools" in template.names


TEMPLATES = (
    "{{ raise_exception('two users') }}",
    "{{ messages[5].content.text }}",
    "{{ 1 // 0 }}",
    "{{ messages + 'x' }}",
)


def test_what_does_not_suit_the_template_is_bad_input(encoder):
    for message in (1, {}, {"role": "user"}, {"content": "x"}, {"role": "user", "tool_calls": []}):
        with pytest.raises(InvalidInputError, match="needs `role` and `content`") as refused:
            encoder.encode([USER, message])
        assert refused.value.field == "prompt[1]"
    for arguments in ("{", "[1]", "[" * 100_000):
        with pytest.raises(InvalidInputError) as refused:
            with_template(encoder, OBJECTS).render(calling(arguments), "messages")
        assert refused.value.field == "messages[1].tool_calls[0].function.arguments"
    for template in TEMPLATES:
        with pytest.raises(InvalidInputError, match="must suit the chat template, which says: "):
            with_template(encoder, template).render([USER], "messages")
    with pytest.raises(InvalidInputError, match="is empty"):
        with_template(encoder, "plain").render([], "messages")
    with pytest.raises(InvalidInputError, match="tokenize"):
        encoder.chat_template.render([USER], "messages", chat_template_kwargs={"tokenize": True})


CORPUS = [
    "the quick brown fox jumps over the lazy dog " * 5,
    " " * 64,
    "a" * 64,
    "été ÀÉÎ 한국어",
] * 8
ALPHABET = (
    "aA e\n\t   \x00\x13é\u0301\u0323\u0308\ufb01\uff21\u2126\u212a\u1fef"
    "한ㄱ\u1100\u1161\u11a8\U0001d400\U0010fffd\U0001f600"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(leave_out: str = "") -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(leave_out))
    tokenizer.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=600, initial_alphabet=letters, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken("<|begin_of_a_turn|>", special=True)])
    return tokenizer


def with_byte_pieces(names: list[str] = BYTES) -> Tokenizer:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "aa": 3, "▁▁": 4, "▁▁▁▁": 5}
    vocab |= {name: index for index, name in enumerate(names, start=len(vocab))}
    merges = [("a", "a"), ("▁", "▁"), ("▁▁", "▁▁")]
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def composing(form: normalizers.Normalizer) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = form
    return tokenizer


def bound_of(tokenizer: Tokenizer) -> MinTokenCount | None:
    return MinTokenCount.of(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


KNOWN = {
    "bytes": byte_level,
    "bytes without some": lambda: byte_level(leave_out="\u0113\u0100"),  # 0x13 and 0x00
    "byte pieces": with_byte_pieces,
    "NFC": lambda: composing(normalizers.NFC()),
    "NFKC": lambda: composing(normalizers.NFKC()),
}


@pytest.mark.parametrize("name", KNOWN)
def test_no_text_has_fewer_tokens(name):
    tokenizer = KNOWN[name]()
    bound = bound_of(tokenizer)
    assert bound is not None
    randomness = random.Random(0)
    closest = 0.0
    for _ in range(300):
        alphabet = randomness.sample(ALPHABET, k=randomness.randint(1, 6))
        text = "".join(randomness.choices(alphabet, k=randomness.randint(1, 150)))
        if randomness.random() < 0.1:
            text += "<|begin_of_a_turn|>" * 5
        count = len(tokenizer.encode(text).ids)
        assert bound.min_tokens(text) <= count, (text, count)
        closest = max(closest, bound.min_tokens(text) / max(count, 1))
    assert closest > 0.1  # and it says something


def unknown_tokenizers() -> dict[str, Tokenizer]:
    takes_blanks = byte_level()
    takes_blanks.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    splits = byte_level()
    splits.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    words = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return {
        "words": words, "takes blanks": takes_blanks, "drops blanks": splits,
        "strips": composing(normalizers.Strip()),
        "shortens": composing(normalizers.Replace("  ", " ")),
        "one for what it lacks": with_byte_pieces(BYTES[:255]),
    }  # fmt: skip


def test_of_others_nothing_is_said():
    for name, tokenizer in unknown_tokenizers().items():
        assert bound_of(tokenizer) is None, name


def test_a_text_that_cannot_fit_is_refused_unread():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    tokenizer.chat_template = "{{ messages[0].content }}"
    encoder = PromptEncoder(tokenizer, len(tokenizer))
    assert len(encoder.encode("fox " * 8, max_tokens=32)) <= 32
    encoder.tokenizer = SimpleNamespace(apply_chat_template=tokenizer.apply_chat_template)
    encoder.tokenizer.chat_template = tokenizer.chat_template
    chat = [{"role": "user", "content": "fox " * 5000}]
    for prompt in ("fox " * 5000, chat):
        with pytest.raises(InvalidInputError, match=r"len\(prompt\).*at most 32 tokens"):
            encoder.encode(prompt, max_tokens=32)
