"""How prompts become token ids: text through the chat template or not, and room in the context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollout import SamplingParams
from rollout.engine.tokenizer import PromptEncoder
from rollout.errors import InvalidInputError
from rollout.offline import ChatTemplateMode, OutputError, RunConfig
from rollout.offline.prompt_tokens import RowEncoder
from tests.helpers.small_jobs import output_rows, run, small_job, with_output, write_rows

CHAT = [{"role": "user", "content": "one two"}]


@pytest.fixture
def encoder(text_model_path: Path) -> PromptEncoder:
    return PromptEncoder.from_pretrained(text_model_path, 97)


@pytest.fixture
def config(text_model_path: Path, tmp_path: Path) -> RunConfig:
    params = SamplingParams(max_new_tokens=4)
    return small_job(text_model_path, tmp_path, [{"prompt": "one two"}, {"prompt": [5]}], params)


def with_template(config: RunConfig, mode: ChatTemplateMode) -> RunConfig:
    return replace(config, data=replace(config.data, chat_template=mode))


def test_text_becomes_a_user_message_unless_it_shall_not(encoder: PromptEncoder) -> None:
    chat, raw = encoder.encode(CHAT), encoder.encode("one two")
    assert chat != raw
    for mode, expected in (("auto", chat), ("always", chat), ("never", raw)):
        rows = RowEncoder(encoder, ChatTemplateMode(mode))
        assert rows.encode("one two")[0] == expected
        assert rows.encode(CHAT)[0] == chat
        assert rows.encode([5, 6])[0] == [5, 6]


def test_text_that_was_put_through_the_template_already_is_not_again(
    encoder: PromptEncoder,
) -> None:
    encoder.tokenizer.add_special_tokens({"additional_special_tokens": ["<user>"]})
    formatted = "<user> one two <assistant>"
    auto, always = (RowEncoder(encoder, ChatTemplateMode(mode)) for mode in ("auto", "always"))
    assert auto.encode(formatted)[0] == encoder.encode(formatted)
    assert "as it stands" in auto.encode(formatted)[1]
    about_tokens = "<pad> one"  # special too, and none of the template's
    assert auto.encode(about_tokens) == always.encode(about_tokens)
    message = [{"role": "user", "content": formatted}]
    assert always.encode(formatted)[0] == encoder.encode(message)


def test_a_template_that_cannot_be_worked_out_is_named(encoder: PromptEncoder) -> None:
    encoder.tokenizer.chat_template = "{{ messages | length // 0 }}"
    with pytest.raises(InvalidInputError, match="must suit the chat template, which says: integer"):
        encoder.encode(CHAT)


def test_without_a_template_text_stands_and_always_is_refused(encoder: PromptEncoder) -> None:
    encoder.tokenizer.chat_template = None
    rows = RowEncoder(encoder, ChatTemplateMode.auto)
    assert rows.encode("one") == (encoder.encode("one"), "text, as it stands")
    with pytest.raises(InvalidInputError, match=r"data.chat_template='always': the tokenizer has"):
        RowEncoder(encoder, ChatTemplateMode.always)


def test_the_choice_is_said_written_and_part_of_the_run(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = with_template(with_output(config, prompt_ids=True), ChatTemplateMode.auto)
    run(config)
    assert (
        "prompts: 1 of text, put through the chat template as a user message "
        "(data.chat_template=never turns that off); 1 of token ids" in caplog.text
    )
    assert [len(row["prompt_ids"]) for row in output_rows(config)] == [4, 1]
    assert [row["prompt"] for row in output_rows(config)] == ["one two", [5]]
    with pytest.raises(OutputError, match=r"data.chat_template was 'auto' and is 'never'"):
        run(with_template(config, ChatTemplateMode.never))


def test_prompts_that_leave_less_of_the_context_than_asked_for_are_counted(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(Path(config.data.path), [{"prompt": [5] * length} for length in (124, 125, 126)])
    run(config)
    assert (
        "2 of 3 prompts leave room for fewer than sampling.max_new_tokens=4 tokens in the context "
        "of 128 (the model's limit): their rollouts end where it is full" in caplog.text
    )
    assert [len(row["token_ids"]) for row in output_rows(config)] == [4, 3, 2]
