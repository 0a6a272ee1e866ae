"""The engines that are compared: without drafts, with each kind, and with two kinds together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_corpus import forget

from rollout import RolloutEngine, SamplingParams
from rollout.types import Prompt

PLAIN = "none"
NGRAM = "ngram"
EAGLE3 = "eagle3"
MTP = "mtp"
HYBRID = "hybrid"
HYBRID_MTP = "hybrid with mtp"
DRAFTING = (EAGLE3, MTP, NGRAM, HYBRID, HYBRID_MTP)

_KV_BYTES = 256 << 20  # several engines share the memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Folders:
    """What is benchmarked. A draft that is None is left out."""

    model: Path
    eagle3: Path | None
    mtp: Path | None

    @property
    def drafting(self) -> tuple[str, ...]:
        """Names of the engines with drafts that can be made."""
        absent = (EAGLE3, HYBRID) * (self.eagle3 is None) + (MTP, HYBRID_MTP) * (self.mtp is None)
        return tuple(name for name in DRAFTING if name not in absent)


def fixed(num_draft_tokens: int) -> dict[str, Any]:
    """`spec_options` of an engine that verifies so many nodes per request, whatever they cost."""
    return {"num_draft_tokens": num_draft_tokens, "budget": "fixed"}


def make_engine(
    folders: Folders, name: str, max_running: int, spec_options: dict[str, Any]
) -> RolloutEngine:
    """In bf16, by one of the names above."""
    spec, draft = {
        PLAIN: ("none", None),
        NGRAM: ("ngram", None),
        EAGLE3: ("eagle", folders.eagle3),
        MTP: ("mtp", folders.mtp),
        HYBRID: ("hybrid", folders.eagle3),
        HYBRID_MTP: ("hybrid", folders.mtp),
    }[name]
    own: dict[str, Any] = {} if draft is None else {"draft_path": str(draft)}
    if name in (MTP, HYBRID_MTP):
        own["topk"] = 4  # a chain of two tokens would be two nodes
    return RolloutEngine.from_pretrained(
        str(folders.model),
        spec=spec,
        spec_options=None if name == PLAIN else spec_options | own,
        dtype="bfloat16",
        max_running=max_running,
        kv_bytes=_KV_BYTES,
    )


def warm_up(engine: RolloutEngine, prompts: Sequence[Prompt]) -> None:
    """The first forwards of a shape are slow. What the corpus saw is forgotten again."""
    engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=24, seed=77))
    forget(engine)
