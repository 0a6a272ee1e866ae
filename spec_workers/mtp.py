"""MTP: drafts by a chain of networks, one for each token ahead."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.config import EngineConfig
from rollout.models.checkpoint import Progress
from spec_workers.eagle import EagleWorker
from spec_workers.neural.draft_factory import open_chain
from spec_workers.options import NeuralOptions, takes
from spec_workers.target import TargetWorker


@dataclass(frozen=True, kw_only=True)
class ChainOptions(NeuralOptions):
    """The options of any neural draft, with fewer draft tokens by default."""

    num_draft_tokens: int = 8


@takes(ChainOptions)
def build(
    config: EngineConfig, progress: Progress | None, options: ChainOptions
) -> EagleWorker | TargetWorker:
    """A worker with an MTP chain.

    ``progress`` is told how far the target's weights are read. Raises InvalidInputError, naming the
    option; CheckpointError and UnsupportedModelError for a chain that cannot be read.
    """
    return EagleWorker.of(open_chain(config, progress, options), config, options)
