"""The comparison with vLLM: true rows, jobs of equal size, and engines that cannot start."""

from __future__ import annotations

import argparse
from pathlib import Path

import bench_vllm
import engine_process
import torch
import vllm_temperatures
from bench_vllm import Done, Engines, Job, compare, inside_rows, plain_rows

SPEC = {"num_draft_tokens": 4, "budget": "fixed", "corpus_bytes": 1 << 20}
OPTIONS = {"spec_options": SPEC, "kv_bytes": 1 << 20, "device": "cpu"}


def test_a_job_is_generated_to_its_limit_whatever_it_says(tiny_model_path: Path) -> None:
    engine = engine_process.OwnEngine(str(tiny_model_path), OPTIONS)
    job = Job(prompts=[[5, 6, 7]] * 3, tokens=12, samples=2, temperature=0.0, width=2)
    answers = [engine_process.run(engine, vars(job)) for _ in range(2)]
    assert [each["lengths"] for each in answers] == [[12] * 6] * 2
    assert answers[1]["accepted"] > 0  # the second epoch
    assert answers[1]["peak_bytes"] > 1 << 20


def test_unequal_numbers_of_tokens_make_no_ratio() -> None:
    own = Done(seconds=[1.0, 3.0], lengths=[[4, 4], [4, 4]], accepted=4)
    other = Done(seconds=[2.0, 6.0], lengths=[[4, 4], [4, 4]])
    rows = list(compare("title", {"own": own, "other": other}, "own", "other", 1.5))
    assert [each.value for each in rows] == [4.0, 2.0, 2.0, 2.0]
    assert rows[1].name == "title: own, accept length"
    other.lengths[1] = [4, 3]
    *_, last = compare("title", {"own": own, "other": other}, "own", "other", 1.5)
    assert (last.value, last.ok, last.bar) == (None, None, 1.5)
    *_, missing = compare("title", {"own": own}, "own", "other", None)
    assert missing.value is None
    assert all(each.value is None for each in inside_rows("title", {"own": own}, 0.97))


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
    known = bench_vllm.engine_options(options)
    assert known["vLLM, our corpus"]["options"]["speculative_config"]["method"] == "custom_class"
    assert known["vLLM, EAGLE-3"]["options"]["speculative_config"]["num_speculative_tokens"] == 3
    absent = {name: {"kind": "vllm", "model": "", "options": {}} for name in known}
    monkeypatch.setattr(bench_vllm, "engine_options", lambda options: absent)
    rows = list(plain_rows(options, Engines(options)))
    assert [each.value for each in rows] == [None] * 4
    assert "specrollout: left out, it did not start" in capsys.readouterr().out
