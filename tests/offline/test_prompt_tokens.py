"""How prompts become token ids: text through the chat template or not, and room in the context."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers.processors import TemplateProcessing

from rollout import SamplingParams
from rollout.engine.tokenizer import PromptEncoder
from rollout.errors import InvalidInputError
from rollout.offline import ChatTemplateMode, OutputError
from rollout.offline.prompt_tokens import RowEncoder
from tests.helpers.small_jobs import output_rows, run, small_job, with_output

CHAT = [{"role": "user", "content": "one two"}]


@pytest.fixture
def encoder(text_model_path):
    return PromptEncoder.from_pretrained(text_model_path, 97)


@pytest.fixture
def config(text_model_path, tmp_path):
    params = SamplingParams(max_new_tokens=4)
    return small_job(text_model_path, tmp_path, [{"prompt": "one two"}, {"prompt": [5]}], params)


def test_text_becomes_a_user_message_unless_it_shall_not(encoder):
    chat, raw = encoder.encode(CHAT), encoder.encode("one two")
    assert chat != raw
    for mode, expected in (("auto", chat), ("always", chat), ("never", raw)):
        rows = RowEncoder(encoder, ChatTemplateMode(mode))
        found = rows.encode_all(["one two", CHAT, [5, 6]])
        assert [ids for ids, _ in found] == [expected, chat, [5, 6]]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_many_prompts_are_encoded_as_each_alone(encoder, adds_bos):
    if adds_bos:
        tokenizer = encoder.tokenizer
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    alone = PromptEncoder(encoder.tokenizer, 97 + adds_bos)
    prompts = ["one two", "", "<s> one", CHAT, [5, 6], [], [97_000], "\ud800", [{"role": "user"}],
               "three " * 40, [{"role": "user", "content": "<s> two"}]]  # fmt: skip
    for prompt, found in zip(prompts, alone.encode_all(prompts), strict=True):
        if isinstance(found, InvalidInputError):
            with pytest.raises(InvalidInputError) as raised:
                alone.encode(prompt)
            assert str(raised.value) == str(found)
        else:
            assert alone.encode(prompt) == found


def test_text_that_was_put_through_the_template_already_is_not_again(encoder):
    encoder.tokenizer.add_special_tokens({"additional_special_tokens": ["<user>"]})
    formatted = "<user> one two <assistant>"
    auto, always = (RowEncoder(encoder, ChatTemplateMode(mode)) for mode in ("auto", "always"))
    ((ids, done),) = auto.encode_all([formatted])
    assert ids == encoder.encode(formatted)
    assert "raw text, which has" in done
    about_tokens = "<pad> one"  # special too, and none of the template's
    assert auto.encode_all([about_tokens]) == always.encode_all([about_tokens])
    message = [{"role": "user", "content": formatted}]
    assert always.encode_all([formatted])[0][0] == encoder.encode(message)


def test_without_a_template_text_stands_and_always_is_refused(encoder):
    encoder.tokenizer.chat_template = None
    rows = RowEncoder(encoder, ChatTemplateMode.auto)
    assert rows.encode_all(["one"]) == [(encoder.encode("one"), "raw text")]
    with pytest.raises(InvalidInputError, match=r"data.chat_template='always': the tokenizer has"):
        RowEncoder(encoder, ChatTemplateMode.always)


def test_the_choice_is_said_written_and_part_of_the_run(config, caplog):
    caplog.set_level("INFO")
    auto = replace(config.data, chat_template=ChatTemplateMode.auto)
    run(with_output(replace(config, data=auto), prompt_ids=True))
    assert "1 of text, as user messages in the chat template (data.chat_t" in caplog.text
    assert "; 1 of token ids" in caplog.text
    assert [len(row["prompt_ids"]) for row in output_rows(config)] == [4, 1]
    assert [row["prompt"] for row in output_rows(config)] == ["one two", [5]]
    with pytest.raises(OutputError, match=r"data.chat_template was 'auto' and is 'never'"):
        run(with_output(config, prompt_ids=True))
