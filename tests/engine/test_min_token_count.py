"""No text has fewer tokens than its bytes let expect, or nothing is expected."""

from __future__ import annotations

import random
import sys
import unicodedata

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from rollout.engine.min_token_count import MinTokenCount
from rollout.engine.tokenizer import PromptEncoder
from rollout.errors import InvalidInputError

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
def test_no_text_has_fewer_tokens(name: str) -> None:
    tokenizer = KNOWN[name]()
    bound = bound_of(tokenizer)
    assert bound is not None
    randomness = random.Random(0)
    closest = 0.0
    for _ in range(600):
        alphabet = randomness.sample(ALPHABET, k=randomness.randint(1, 6))
        text = "".join(randomness.choices(alphabet, k=randomness.randint(1, 150)))
        if randomness.random() < 0.1:
            text += "<|begin_of_a_turn|>" * 5
        count = len(tokenizer.encode(text).ids)
        assert bound.min_tokens(text) <= count, (text, count)
        closest = max(closest, bound.min_tokens(text) / max(count, 1))
    assert closest > 0.1  # and it says something


def test_composed_characters_have_not_more_bytes_than_is_counted_with() -> None:
    alone = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    for character in alone:
        for form in ("NFC", "NFKC"):
            normal = unicodedata.normalize(form, character)
            assert len(character.encode()) <= 4 * len(normal.encode())
            assert len(unicodedata.normalize("NFD", character)) <= 4


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


def test_of_others_nothing_is_said() -> None:
    for name, tokenizer in unknown_tokenizers().items():
        assert bound_of(tokenizer) is None, name


def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    tokenizer.chat_template = "{{ messages[0].content }}"
    encoder = PromptEncoder(tokenizer, len(tokenizer))
    assert len(encoder.encode("fox " * 8, max_tokens=32)) <= 32
    calls: list[str] = []
    encoder.tokenizer = Refusing(tokenizer, calls)
    chat = [{"role": "user", "content": "fox " * 5000}]
    for prompt in ("fox " * 5000, chat):
        with pytest.raises(InvalidInputError, match=r"len\(prompt\).*1 to 32 tokens"):
            encoder.encode(prompt, max_tokens=32)
    assert not calls


class Refusing:
    """A tokenizer that notes what it is asked to encode."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, calls: list[str]) -> None:
        self._tokenizer, self._calls = tokenizer, calls

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        self._calls.append(text)
        return {"input_ids": [0]}

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)
