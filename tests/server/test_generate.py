"""`/generate`: the tokens and logprobs of offline generation, whoever asks beside."""

from __future__ import annotations

from rollout import RolloutEngine, SamplingParams


def test_a_request_has_the_tokens_of_offline_generation(live, text_model_path):
    params = {"temperature": 0.9, "max_new_tokens": 12, "seed": 5}
    (expected,) = RolloutEngine.from_pretrained(text_model_path).generate(
        [[6, 7, 8]], SamplingParams(**params)
    )
    with live.client() as client:
        answer = client.post("/generate", json={"input_ids": [6, 7, 8], "sampling_params": params})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output_ids"] == expected.token_ids


def test_health(live):
    with live.client() as client:
        assert client.get("/health").status_code == 200
