"""Tokens per target forward with eight nodes, whatever they cost, of held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from engine_corpus import forget
from table import Row, row

from eagle_bench.entrants import EAGLE3, PLAIN, Folders, fixed, make_engine
from rollout import SamplingParams
from rollout.types import Prompt

NUM_NODES = 8
BATCH = 16

BARS = {"greedy": 2.2, "T 0.7": 1.8}
"""Of EAGLE-3."""


def accept_length_rows(folders: Folders, prompts: Sequence[Prompt], max_tokens: int) -> list[Row]:
    """Each engine decodes the prompts once at each temperature; the corpus begins empty each time.

    Raises RuntimeError where drafts changed the tokens.
    """
    settings = {
        name: SamplingParams(temperature=temperature, max_new_tokens=max_tokens, seed=1)
        for name, temperature in (("greedy", 0.0), ("T 0.7", 0.7), ("T 1.0", 1.0))
    }
    plain = make_engine(folders, PLAIN, BATCH, {})
    expected = {
        name: [rollout.token_ids for rollout in plain.generate(prompts, params)]
        for name, params in settings.items()
    }
    rows: list[Row] = []
    for entrant in folders.drafting:
        engine = make_engine(folders, entrant, BATCH, fixed(NUM_NODES))
        for name, params in settings.items():
            forget(engine)
            engine.reset_metrics()
            if [r.token_ids for r in engine.generate(prompts, params)] != expected[name]:
                raise RuntimeError(f"{entrant}, {name}: speculation changed the tokens")
            length = engine.metrics().accept_length
            bar = BARS.get(name) if entrant == EAGLE3 else None
            rows.append(row(f"accept length, {name}: {entrant}", length, "tokens", bar))
            print(f"{rows[-1].name} {length:.3f}", flush=True)
    return rows
