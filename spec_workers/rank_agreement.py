"""Checks that ranks agree: on their settings as they start, and on values in each step.

Everything a step does follows from what it is asked and from what was learned before. Time is the
one thing that ranks do not share, so rank 0's is the one they all learn from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import numpy as np
import torch

from rollout.config import EngineConfig
from rollout.errors import ParallelError
from rollout.models.spec import ModelSpec
from rollout.parallel import RankGroup
from rollout.parallel.rank_group import check_alike
from rollout.types import Batch, DraftTrees, EntryResult, StepTimes


def check_settings(group: RankGroup, config: EngineConfig, device: torch.device) -> None:
    """Raises ParallelError where another rank has other versions, configuration or model.

    Files and devices may have other names on other hosts.
    """
    if group.size == 1:
        return
    sections = asdict(config) | {"config.json": asdict(ModelSpec.read(Path(config.model.path)))}
    settings: dict[str, object] = {name: version(name) for name in ("specrollout", "torch")}
    for section, part in sections.items():
        fields = part if isinstance(part, dict) else {"": part}
        settings |= {f"{section}.{name}".rstrip("."): value for name, value in fields.items()}
    for own in ("model.path", "model.tokenizer", "num_threads"):
        del settings[own]
    check_alike(group, settings | {"model.device": device.type})


def version(package: str) -> str:
    """The version of an installed package; empty: it runs from a source tree."""
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return ""


def agreed_times(group: RankGroup, times: StepTimes) -> StepTimes:
    """Rank 0's times, on every rank."""
    if group.size == 1:
        return times
    draft, forward, sample = group.broadcast_floats([times.draft, times.forward, times.sample])
    return StepTimes(draft=draft, forward=forward, sample=sample)


def check_drafts(group: RankGroup, batch: Batch, trees: DraftTrees) -> None:
    """Raises ParallelError where another rank runs other requests, or other drafts of them."""
    # By seed: numbers of requests are a rank's own.
    entries = [(each.request.seed, each.start, each.end) for each in batch.entries]
    arrays = (np.array(entries, dtype=np.uint64), trees.offsets_B1, trees.tokens_N, trees.parents_N)
    _check(group, f"step {batch.step}, before its forward: requests or drafts", arrays)


def check_results(group: RankGroup, batch: Batch, results: Sequence[EntryResult]) -> None:
    """Raises ParallelError where another rank sampled other tokens, or with other logprobs."""
    tokens = np.array([each for result in results for each in result.token_ids], dtype=np.int64)
    logprobs = np.array([each for result in results for each in result.logprobs])
    _check(group, f"step {batch.step}: tokens or logprobs", (tokens, logprobs))


def _check(group: RankGroup, what: str, arrays: Iterable[np.ndarray]) -> None:
    digest = hashlib.blake2b(digest_size=7)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    numbers = group.all_gather_int(int.from_bytes(digest.digest()))
    if len(set(numbers)) > 1:
        others = [str(rank) for rank, number in enumerate(numbers) if number != numbers[0]]
        raise ParallelError(f"{what} of rank {', '.join(others)} are not those of rank 0")
