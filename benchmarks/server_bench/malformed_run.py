"""Thousands of malformed requests to one server, and what is left of them in its engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from table import Row, row

from rollout import RolloutEngine

from .crowd import Outcome, send_all
from .malformed import malformed
from .servers import served_here

_CONTEXT = 64  # of requests without a limit of their own: they soon end


def malformed_requests(model: Path, count: int, seed: int, threads: int) -> list[Row]:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # each is a warning to it
    engine = RolloutEngine.from_pretrained(
        str(model), max_context_len=_CONTEXT, max_kv_tokens=8192, num_threads=threads
    )
    started = time.perf_counter()
    with served_here(engine, model, model_name="m", max_prompt_len=32) as (port, serving):
        outcomes = asyncio.run(
            send_all(port, malformed(count, seed), num_clients=24, timeout=120.0)
        )
        seconds = time.perf_counter() - started
        while serving.loop.num_unfinished:
            time.sleep(0.01)
        serving.loop.call(lambda engine: engine.check_integrity()).result(60)
        used = serving.loop.call(lambda engine: engine.status().kv_used).result(60)
        left = serving.num_unfinished
    engine.close()
    _show(outcomes)
    troubles = sum(bool(each.trouble) for each in outcomes)
    refused = sum(400 <= (each.status or 0) < 500 for each in outcomes)
    return [
        row("malformed requests", len(outcomes), ""),
        row("refused", refused, ""),
        row("errors of the server, or no answer", troubles, "", 0.0, at_most=True),
        row("requests left", left, "", 0.0, at_most=True),
        row("KV slots left", used, "", 0.0, at_most=True),
        row("handled", len(outcomes) / seconds, "requests/s"),
    ]


def _show(outcomes: list[Outcome]) -> None:
    console = Console(width=110)
    kinds = Counter((each.request.kind, str(each.status or "closed")) for each in outcomes)
    for kind in sorted({kind for kind, _ in kinds}):
        counts = {status: n for (of, status), n in sorted(kinds.items()) if of == kind}
        console.print(kind, *(f"{status}: {n}" for status, n in counts.items()), highlight=False)
    for each in [each for each in outcomes if each.trouble][:10]:
        console.print(each.trouble, repr(each.request.raw[:300]), markup=False)
