"""The protocol of a replica's engine: what a cluster asks of it beside what all ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rollout.engine.draft_corpus import CorpusDelta
from rollout.engine.protocol import Engine, Ranks, called_on
from rollout.weights.bucket import PackedBucket
from rollout.weights.manifest import TensorSpec


class ReplicaEngine(Engine, Protocol):
    """The engine of one process, or of ranks that run one model, as a replica."""

    @called_on(Ranks.FIRST)
    def weights_manifest(
        self, selector: str = "all", *, model_path: str | Path | None = None
    ) -> dict[str, TensorSpec]: ...
    @called_on(Ranks.EVERY)
    def read_weights(self, names: Sequence[str]) -> PackedBucket: ...
    @called_on(Ranks.EVERY)
    def update_weights_from_bucket(
        self, bucket: PackedBucket, *, direct: bool = False, **options: Any
    ) -> None: ...
    @called_on(Ranks.EVERY)
    def decline_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str | torch.dtype],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        reason: str,
        *,
        load_format: str | None = None,
    ) -> None: ...
    @called_on(Ranks.EVERY)
    def share_corpus(self, max_bytes: int = ...) -> None: ...
    @called_on(Ranks.EVERY)
    def take_corpus_delta(self) -> CorpusDelta: ...
    @called_on(Ranks.EVERY)
    def learn_corpus_deltas(self, deltas: Sequence[CorpusDelta]) -> None: ...
    @called_on(Ranks.EVERY)
    def take_configured_corpora(self) -> dict[str, str]: ...
