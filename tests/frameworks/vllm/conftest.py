"""Engines of vLLM with the demo model: one after another, each in processes of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before vLLM is imported. Its threads are not bound: the tests are not alone on the machine.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's own objects are looked at
os.environ["HF_HUB_OFFLINE"] = "1"

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
MODEL = Path(__file__).parents[3] / "models" / "SmolLM2-135M-Instruct"
PROPOSER = {
    "method": "custom_class", "model": "specrollout.NgramProposer", "num_speculative_tokens": 6
}  # fmt: skip


def start(**options: Any) -> Any:
    """vLLM with few blocks, so that requests are preempted, and prompts computed in chunks."""
    import vllm_temperatures
    from vllm import LLM

    llm = LLM(
        str(MODEL), dtype="bfloat16", enforce_eager=True, max_model_len=512, max_num_seqs=16,
        max_num_batched_tokens=64, num_gpu_blocks_override=14, disable_log_stats=False, **options,
    )  # fmt: skip
    vllm_temperatures.mend()
    return llm


@pytest.fixture(scope="session")
def plain() -> Any:
    return start()


@pytest.fixture(scope="session")
def drafting(plain: Any) -> Iterator[Any]:
    """With the corpus, which drafts whatever it costs: what drafts do to tokens is tested."""
    llm = start(
        speculative_config=PROPOSER,
        worker_extension_cls="spec_workers.vllm.CorpusWorkerExtension",
        additional_config={"specrollout": {"budget": "fixed", "corpus_bytes": 16 << 20}},
    )
    yield llm
    (worker,) = llm.collective_rpc(lambda worker: worker)
    worker.model_runner.drafter.check_integrity()
