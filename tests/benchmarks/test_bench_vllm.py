"""The comparison with vLLM: true rows, jobs of equal size, and engines that cannot start."""

from __future__ import annotations

import argparse
from pathlib import Path

import bench_vllm
import engine_process
import engines
import torch
import vllm_replay
import vllm_temperatures
from bench_vllm import inside_rows, plain_rows, rates, ratio
from engines import Done, Engines, Job

SPEC = {"num_draft_tokens": 4, "budget": "fixed", "corpus_bytes": 1 << 20}
OPTIONS = {"spec_options": SPEC, "kv_bytes": 1 << 20, "device": "cpu"}


def test_a_job_is_generated_to_its_limit_whatever_it_says(tiny_model_path: Path) -> None:
    engine = engine_process.OwnEngine(str(tiny_model_path), OPTIONS)
    job = Job(prompts=[[5, 6, 7]] * 3, tokens=12, samples=2, temperature=0.0, width=2)
    answers = [engine_process.run(engine, vars(job)) for _ in range(2)]
    assert [each["lengths"] for each in answers] == [[12] * 6] * 2
    assert answers[0]["decodes"] > answers[1]["decodes"] > 6  # drafts, and more in the next epoch
    assert answers[1]["peak_bytes"] > 1 << 20
    assert [each["outputs"] for each in answers] == [[], []]
    told = engine_process.run(engine, vars(job) | {"returns_tokens": True})
    assert [len(tokens) for tokens in told["outputs"]] == told["lengths"]


def test_unequal_numbers_of_tokens_make_no_ratio() -> None:
    own = Done(seconds=[1.0, 3.0], lengths=[[4, 4], [4, 4]], decodes=6)
    other = Done(seconds=[2.0, 6.0], lengths=[[4, 4], [4, 4]], decodes=12)
    done = {"own": own, "other": other}
    assert [each.value for each in rates("title", done)] == [4.0, 2.0, 2.0]
    assert next(iter(rates("title", done))).name == "title: own"
    assert ratio("title", done, "own", "other", 1.5).value == 2.0
    other.lengths[1] = [4, 3]
    unequal = ratio("title", done, "own", "other", 1.5)
    assert (unequal.value, unequal.ok, unequal.bar) == (None, None, 1.5)
    assert ratio("title", {"own": own}, "own", "other", None).value is None


def test_a_replay_accepts_what_was_recorded() -> None:
    """The corpus proposes nothing in text of its first occurrence, and most of it at its second."""
    config = vllm_replay.config_of(4, 2, 40, 50)
    texts = [[1, 2, 3, *range(10 * k, 10 * k + 10)] for k in range(1, 5)]
    epochs = [
        [
            vllm_replay.Replayed(name=f"{e}-{k}", prompt=text[:3], output=text[3:])
            for k, text in enumerate(texts)
        ]
        for e in range(2)
    ]
    first = vllm_replay.replay(epochs[:1], 2, 40, vllm_replay.corpus_of(config))
    assert first["tokens"] == 4 * 9  # the first token of each comes of its prompt
    for request in epochs[0]:
        request.done = 0
    second = vllm_replay.replay(epochs, 2, 40, vllm_replay.corpus_of(config))
    assert second["tokens"] == 4 * 9
    assert second["rows"] < 4 * 4 < first["rows"] <= 4 * 9
    assert all(request.done == 10 for epoch in epochs for request in epoch)


def test_temperatures_are_those_of_each_requests_rows() -> None:
    ends = torch.tensor([2, 2, 3, 6], dtype=torch.int32)  # the second verifies nothing
    expanded = vllm_temperatures.expand(torch.tensor([0.5, 9.0, 0.0, 0.25]), ends, 6, 0, 1)
    assert expanded.tolist() == [0.5, 0.5, 1.0, 0.25, 0.25, 0.25]


def test_an_engine_that_does_not_start_is_left_out(tmp_path: Path, monkeypatch, capsys) -> None:
    options = argparse.Namespace(
        model=Path(bench_vllm.__file__).parents[1] / "models" / "SmolLM2-135M-Instruct",
        draft=tmp_path, device="cpu", eager=True, threads=1, vllm_python=Path("/bin/false"),
        tokens=2, repeats=1,
    )  # fmt: skip
    known = engines.engine_options(options)
    assert known["vLLM, our corpus"]["options"]["speculative_config"]["method"] == "custom_class"
    assert known["vLLM, EAGLE-3"]["options"]["speculative_config"]["num_speculative_tokens"] == 3
    absent = {name: {"kind": "vllm", "model": "", "options": {}} for name in known}
    monkeypatch.setattr(engines, "engine_options", lambda options: absent)
    rows = list(plain_rows(options, Engines(options)))
    assert [each.value for each in rows] == [None] * 4
    assert all(each.value is None for each in inside_rows(options, Engines(options)))
    assert "specrollout: left out, it did not start" in capsys.readouterr().out
