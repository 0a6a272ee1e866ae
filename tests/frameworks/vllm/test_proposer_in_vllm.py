"""The corpus inside vLLM, unmodified: vLLM's tokens, its distribution, and drafts that hit.

vLLM does not promise equal bits: its kernels sum in another order where more rows share a forward.
The rule for greedy tokens is therefore: up to the first difference they are equal, and there the
plain engine itself held the other token for as likely, within `NOISE` nats.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from scipy.stats import chi2_contingency
from vllm import SamplingParams

NOISE = 0.2  # nats between two tokens whose order bf16 may swap

PROMPTS = [
    "Repeat the following text exactly: the river rises in the hills above the village.",
    "Continue this list: 1. Item 1 costs 10 dollars. 2. Item 2 costs 20 dollars.",
    "Explain how a bicycle stays upright while it is moving.",
    "Write a JSON array of three cities.",
]


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(sample.token_ids) for each in outputs for sample in each.outputs]


def generate(llm: Any, prompts: list[str], **params: Any) -> list[list[int]]:
    asked = SamplingParams(**{"ignore_eos": True} | params)
    return tokens_of(llm.generate(prompts, asked, use_tqdm=False))


def counters(llm: Any) -> dict[str, float]:
    return llm.collective_rpc("corpus_counters")[0]


def expect_greedy(plain: Any, prompts: list[str], max_tokens: int = 48) -> Any:
    """What plain vLLM says, and how likely it held other tokens."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5)
    return [each.outputs[0] for each in plain.generate(prompts, params, use_tqdm=False)]


def assert_equal_up_to_noise(own: list[list[int]], expected: Any) -> None:
    for tokens, known in zip(own, expected, strict=True):
        for token, best, logprobs in zip(tokens, known.token_ids, known.logprobs, strict=True):
            if token != best:
                assert token in logprobs, "a token that the plain engine held for unlikely"
                assert logprobs[best].logprob - logprobs[token].logprob < NOISE
                break


def test_greedy_tokens_are_vllms_own(plain: Any, drafting: Any) -> None:
    expected = expect_greedy(plain, PROMPTS)
    before = counters(drafting)
    for _ in range(2):
        own = generate(drafting, PROMPTS, temperature=0, max_tokens=48)
        assert_equal_up_to_noise(own, expected)
    after = counters(drafting)
    assert after["accepted"] - before["accepted"] > after["rows"] - before["rows"]


def test_cached_prefixes_and_chunks_of_prompts(plain: Any, drafting: Any) -> None:
    """A prompt of several steps and blocks; the second time its blocks are not computed anew."""
    numbered = " ".join(f"Line {n} of the poem has {n + 3} words." for n in range(25))
    prompts = [f"{numbered} Line 25", f"{numbered} The poem ends"]
    expected = expect_greedy(plain, prompts, 24)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    drafting.reset_prefix_cache()
    for cached in (0, 256):
        outputs = [drafting.generate([each], params, use_tqdm=False)[0] for each in prompts]
        assert len(outputs[0].prompt_token_ids) > 4 * 64
        assert outputs[0].num_cached_tokens == cached
        assert outputs[1].num_cached_tokens == 256  # two blocks of the first prompt
        assert_equal_up_to_noise(tokens_of(outputs), expected)


def test_the_sampled_distribution_is_vllms_own(plain: Any, drafting: Any) -> None:
    """Three tokens out of four each, many times: the two engines' counts are of one distribution.

    The corpus drafts at every step: earlier samples hold all that may come.
    """
    params = SamplingParams(
        n=400, temperature=1.0, max_tokens=3, ignore_eos=True, allowed_token_ids=[28, 29, 30, 31]
    )
    found = []
    before = counters(drafting)
    for llm in (plain, drafting):
        outputs = llm.generate(["Choose:"], params, use_tqdm=False)
        found.append(Counter(map(tuple, tokens_of(outputs))))
    after = counters(drafting)
    assert after["accepted"] - before["accepted"] > 50
    assert after["drafted"] - before["drafted"] > after["accepted"] - before["accepted"]
    keys = sorted(found[0] + found[1])
    table = [[counts[key] for key in keys] for counts in found]
    rare = [k for k in range(len(keys)) if table[0][k] + table[1][k] < 10]
    kept = [k for k in range(len(keys)) if k not in rare]
    table = [[row[k] for k in kept] + [sum(row[k] for k in rare) + 1] for row in table]
    assert chi2_contingency(table).pvalue > 1e-3


def test_64_requests_preempted_and_aborted(drafting: Any) -> None:
    text = "The river rises in the hills above the village. " * 9
    prompts = [f"Number {k}. {text}" for k in range(64)]
    lengths = [32 + 2 * (k % 20) for k in range(64)]  # most go beyond a block of 128
    params = [SamplingParams(temperature=0.8, max_tokens=n, ignore_eos=True) for n in lengths]
    metrics = {each.name: each for each in drafting.get_metrics()}
    before = metrics["vllm:num_preemptions"].value
    engine = drafting.llm_engine
    for k, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"own-{k}", prompt, each)
    done: dict[str, int] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = len(output.outputs[0].token_ids)
        steps += 1
        if steps == 10:
            engine.abort_request([f"own-{k}" for k in range(0, 64, 8)])
    left = {f"own-{k}": n for k, n in enumerate(lengths) if k % 8}
    assert {name: done[name] for name in left} == left
    metrics = {each.name: each for each in drafting.get_metrics()}
    assert metrics["vllm:num_preemptions"].value > before
    assert counters(drafting)["corpus/open_sequences"] <= 3 * 16


def test_the_second_epoch_is_drafted_better(drafting: Any) -> None:
    def accept_length() -> float:
        before = counters(drafting)
        generate(drafting, PROMPTS[2:], temperature=0.3, max_tokens=40, n=4)
        after = counters(drafting)
        rows, accepted = (after[name] - before[name] for name in ("rows", "accepted"))
        return (rows + accepted) / rows

    first, second = accept_length(), accept_length()
    assert second > first
    drafting.collective_rpc("set_corpus_policy", args=(1,))
    assert counters(drafting)["corpus/weight_version"] == 1
    assert accept_length() > first


def test_after_a_weight_update_the_new_policy_speaks(plain: Any, drafting: Any) -> None:
    """The corpus holds what the old one said, and drafts it in vain."""
    old = expect_greedy(plain, PROMPTS)
    for llm in (plain, drafting):
        llm.collective_rpc(turn_final_norm)
        llm.reset_prefix_cache()
    drafting.collective_rpc("set_corpus_policy", args=(2,))
    try:
        new = expect_greedy(plain, PROMPTS)
        assert [each.token_ids for each in new] != [each.token_ids for each in old]
        for _ in range(2):
            own = generate(drafting, PROMPTS, temperature=0, max_tokens=48)
            assert_equal_up_to_noise(own, new)
    finally:
        for llm in (plain, drafting):
            llm.collective_rpc("reload_weights")
            llm.reset_prefix_cache()
    drafting.collective_rpc("set_corpus_policy", args=(3,))
    assert_equal_up_to_noise(generate(drafting, PROMPTS, temperature=0, max_tokens=48), old)


def turn_final_norm(worker: Any) -> None:
    """Weights that say something else: every tenth channel of the last norm is turned."""
    worker.model_runner.model.model.norm.weight.data[::10] *= -1


def test_a_corpus_is_saved_and_loaded(drafting: Any, tmp_path: Path) -> None:
    drafting.collective_rpc("save_corpus", args=(str(tmp_path / "corpus"),))
    held = counters(drafting)["corpus/live_tokens"]
    drafting.collective_rpc("load_corpus", args=(str(tmp_path / "corpus"),))
    assert counters(drafting)["corpus/live_tokens"] == held
    generate(drafting, PROMPTS[:1], temperature=0, max_tokens=8)


def test_external_corpora(drafting: Any) -> None:
    text = "The lighthouse keeper counted seven ships, four gulls and one very small whale."
    drafting.collective_rpc("add_external_corpus", args=("story", [text]))
    while counters(drafting).get("external/story") != 1.0:
        generate(drafting, ["Hello"], temperature=0, max_tokens=2)
    drafting.collective_rpc("remove_external_corpus", args=("story",))
    assert "external/story" not in counters(drafting)
