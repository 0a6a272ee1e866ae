"""Engines over the demo model, the corpora that they draft from, and their comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout import RolloutEngine, SamplingParams
from rollout.offline.compare.comparison import Comparison, Work
from rollout.offline.compare.paired_times import PairedTimes
from rollout.types import Prompt
from spec_workers.ngram import NgramWorker

PLAIN = "none"


def make_engine(
    model: Path, spec: str, max_running: int, spec_options: dict[str, Any], **options: Any
) -> RolloutEngine:
    """An engine in bf16 with little KV, as several share the memory."""
    return RolloutEngine.from_pretrained(
        str(model),
        spec=spec,
        spec_options=None if spec == PLAIN else spec_options,
        dtype="bfloat16",
        max_running=max_running,
        **{"kv_bytes": 256 << 20} | options,
    )


def fixed(num_draft_tokens: int) -> dict[str, Any]:
    """`spec_options` of an engine that verifies so many nodes per request, whatever they cost."""
    return {"num_draft_tokens": num_draft_tokens, "budget": "fixed"}


def forget(engine: RolloutEngine) -> None:
    """Empty the corpus, where there is one."""
    if isinstance(engine.worker, NgramWorker):
        engine.worker.corpus.reset()


def warm_up(engine: RolloutEngine, prompts: Sequence[Prompt], max_tokens: int) -> None:
    """Run the first forwards of each shape, which are slow, and forget what the corpus saw.

    ``max_tokens``: tokens of a rollout that is timed; a warm one has 24 at max_tokens.
    """
    params = SamplingParams(temperature=1.0, max_new_tokens=min(24, max_tokens), seed=77)
    engine.generate(prompts, params)
    forget(engine)


def hold(comparison: Comparison, work: Work, name: str) -> PairedTimes:
    """Compare all of the work. Raises RuntimeError where drafts changed a token or a logprob."""
    compared = comparison.run(work, math.inf)
    print(f"{name}: {compared}", flush=True)
    if compared.differing:
        raise RuntimeError(f"{name}: speculation changed {compared.differing}")
    return compared.times
