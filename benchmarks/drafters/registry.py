"""Drafters by the names of the command line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from traces import load_trace

from drafters.corpus import CorpusDrafter
from drafters.drafter import Drafter

_NEEDS = {
    "corpus": "ngram_native",
    "prompt-lookup": "transformers",
    "arctic": "arctic_inference",  # trees, with the settings that suit it best
    "arctic-chain": "arctic_inference",  # as it comes
}
DRAFTERS = tuple(_NEEDS)
PEERS = tuple(name for name in DRAFTERS if name != "corpus")


def missing(name: str) -> str | None:
    """Why a drafter cannot run here, if it cannot."""
    if importlib.util.find_spec(_NEEDS[name]) is None:
        return f"{name}: skipped, no package {_NEEDS[name]}"
    return None


def make_drafter(name: str, *, floor: float = 0.0, external: Path | None = None) -> Drafter:
    """A fresh drafter; each replay needs its own.

    Args:
        name: Of `DRAFTERS`, and not `missing`.
        floor: Nodes the corpus holds less likely are not drafted; the peers have their own.
        external: A trace whose responses the corpus holds beforehand.
    """
    if name == "corpus":
        documents = load_trace(external).responses if external is not None else []
        return CorpusDrafter(min_probability=floor, external=documents)
    if name == "prompt-lookup":
        from drafters.prompt_lookup import PromptLookupDrafter

        return PromptLookupDrafter()
    from drafters.suffix_decoding import SuffixDecodingDrafter

    if name == "arctic":
        return SuffixDecodingDrafter(tree=True, factor=4.0, min_probability=0.02)
    return SuffixDecodingDrafter(tree=False, factor=1.0, min_probability=0.1)
