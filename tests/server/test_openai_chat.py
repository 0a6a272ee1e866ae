"""`/v1/chat/completions` by the official client."""

from __future__ import annotations

from rollout import RolloutEngine, SamplingParams
from tests.server.conftest import Live
from tests.server.openai_clients import client_of, joined_parts, top_of

MESSAGES = [
    {"role": "system", "content": "one two"},
    {"role": "user", "content": "three four"},
]


def test_the_tokens_of_offline_generation_bit_for_bit(live: Live, offline: RolloutEngine) -> None:
    params = SamplingParams(
        seed=6, n=2, temperature=0.8, max_new_tokens=20, top_logprobs=2, ignore_eos=True
    )
    expected = offline.generate([MESSAGES], params)
    answer = client_of(live).chat.completions.create(
        model=live.serving.model_name,
        messages=MESSAGES,
        seed=6,
        n=2,
        temperature=0.8,
        max_completion_tokens=20,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert answer.prompt_token_ids == expected[0].prompt_ids
    assert answer.usage.prompt_tokens == len(expected[0].prompt_ids)
    assert answer.usage.completion_tokens == 40
    for choice, rollout in zip(answer.choices, expected, strict=True):
        assert choice.message.role == "assistant"
        assert choice.message.content == rollout.text
        assert choice.token_ids == rollout.token_ids
        content = choice.logprobs.content
        assert [entry.logprob for entry in content] == rollout.logprobs
        tops = [[top.logprob for top in entry.top_logprobs] for entry in content]
        assert tops == top_of(rollout, 2)
        spelled = b"".join(bytes(entry.bytes) for entry in content).decode()
        assert (
            spelled == offline.encoder.decode_with_specials([7, *rollout.token_ids])[len("one") :]
        )


def test_content_may_be_parts_of_text(live: Live) -> None:
    parts = [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}]
    answers = [
        client_of(live).chat.completions.create(
            model=live.serving.model_name,
            messages=[MESSAGES[0], {"role": "user", "content": content}],
            max_tokens=1,
            extra_body={"return_token_ids": True},
        )
        for content in ("three four", parts)
    ]
    assert answers[0].prompt_token_ids == answers[1].prompt_token_ids


def test_an_answer_may_fill_the_context(live: Live) -> None:
    answer = client_of(live).chat.completions.create(
        model=live.serving.model_name,
        messages=MESSAGES,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_the_last_message_may_be_continued(live: Live, offline: RolloutEngine) -> None:
    answer = client_of(live).chat.completions.create(
        model=live.serving.model_name,
        messages=[*MESSAGES, {"role": "assistant", "content": "five"}],
        max_tokens=1,
        extra_body={"return_token_ids": True, "continue_final_message": True},
    )
    rendered = "<system> one two <user> three four <assistant> five"
    assert answer.prompt_token_ids == offline.encoder.encode(rendered)


def test_a_stream_says_who_speaks_first_and_counts_at_the_end(
    live: Live, offline: RolloutEngine
) -> None:
    params = SamplingParams(seed=8, n=3, max_new_tokens=30)
    expected = offline.generate([MESSAGES], params)
    chunks = list(
        client_of(live).chat.completions.create(
            model=live.serving.model_name,
            messages=MESSAGES,
            seed=8,
            n=3,
            max_tokens=30,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    for index, chunk in enumerate(chunks[:3]):
        (part,) = chunk.choices
        assert (part.index, part.delta.role, part.delta.content) == (index, "assistant", "")
    assert chunks[0].prompt_token_ids == expected[0].prompt_ids
    *others, last = chunks
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == []
    assert last.usage.completion_tokens == sum(len(rollout.token_ids) for rollout in expected)
    assert last.system_fingerprint == "weights-0"
    assert len({chunk.id for chunk in chunks}) == 1
    for index, choice in joined_parts(chunks).items():
        assert choice["text"] == expected[index].text
        assert choice["token_ids"] == expected[index].token_ids
        assert choice["finish_reason"] == str(expected[index].finish_reason)
        logprobs = [entry.logprob for part in choice["logprobs"] for entry in part.content]
        assert logprobs == expected[index].logprobs
