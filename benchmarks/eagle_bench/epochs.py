"""What RL decodes: problems, groups of samples of each, and each again an epoch later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from table import Row, row

from eagle_bench.accept_length import BATCH, NUM_NODES
from eagle_bench.entrants import (
    EAGLE3,
    HYBRID,
    HYBRID_MTP,
    MTP,
    NGRAM,
    PLAIN,
    Folders,
    fixed,
    make_engine,
)
from rollout import SamplingParams
from rollout.types import Prompt

EPOCHS = 2
GROUP = 8
ALONE = {HYBRID: EAGLE3, HYBRID_MTP: MTP}
BAR = 1.05
"""What a hybrid must be to the better of its two parts, each alone."""


def epoch_rows(
    folders: Folders, prompts: Sequence[Prompt], max_tokens: int, temperature: float
) -> list[Row]:
    """Accept lengths with eight nodes, over all epochs, each drawn with seeds of its own.

    Raises RuntimeError where drafts changed the tokens.
    """
    params = SamplingParams(temperature=temperature, max_new_tokens=max_tokens, n=GROUP)
    lengths: dict[str, float] = {}
    expected: list[list[list[int]]] = []
    for entrant in (PLAIN, *folders.drafting):
        options = {} if entrant == PLAIN else fixed(NUM_NODES)
        engine = make_engine(folders, entrant, BATCH, options)
        decoded = [
            [r.token_ids for r in engine.generate(prompts, replace(params, seed=epoch))]
            for epoch in range(EPOCHS)
        ]
        expected = expected or decoded
        if decoded != expected:
            raise RuntimeError(f"{entrant}: speculation changed the tokens")
        lengths[entrant] = engine.metrics().accept_length
        print(f"{EPOCHS} epochs of groups: {entrant} {lengths[entrant]:.3f}", flush=True)
    name = f"{EPOCHS} epochs, groups of {GROUP}, T {temperature:g}"
    rows = [
        row(f"{name}, accept length: {entrant}", lengths[entrant], "tokens")
        for entrant in folders.drafting
    ]
    for hybrid, neural in ALONE.items():
        if hybrid in lengths:
            better = max(lengths[NGRAM], lengths[neural])
            ratio = lengths[hybrid] / better
            rows.append(row(f"{name}: {hybrid} to the better alone", ratio, "x", BAR))
    return rows
