"""MTP: drafts by a chain of networks, one for each token ahead."""

from __future__ import annotations

from pathlib import Path

from rollout.config import EngineConfig, ParallelMode
from rollout.errors import CheckpointError
from rollout.models.loader import Progress
from rollout.models.mtp.loader import MtpChain
from rollout.models.spec import ModelSpec
from rollout.types import MAX_TREE_NODES
from rollout.weights.disk import CheckpointSource
from spec_workers.budget import FixedBudget, LearnedBudget
from spec_workers.draft_sizing import draft_bytes
from spec_workers.eagle import EagleWorker
from spec_workers.neural.device_proposal import proposal_graphs
from spec_workers.neural.multi_layer_drafter import MultiLayerEagleDrafter
from spec_workers.options import check_budget, check_number, check_topk
from spec_workers.target import TargetWorker


class MultiLayerEagleWorker(EagleWorker):
    """Proposes what a chain of drafts thinks of."""

    drafter: MultiLayerEagleDrafter


def build(
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    draft_path: str | None = None,
    num_steps: int | None = None,
    topk: int = 1,
    num_draft_tokens: int = 8,
    budget: str = "learned",
    min_probability: float = 0.02,
    calibration_seconds: float = 1.0,
    frozen: bool = True,
    lockstep: bool = False,
) -> MultiLayerEagleWorker:
    """A worker with an MTP chain.

    Args:
        progress: told how far the target's weights are read.
        draft_path: the chain's folder; default: the target's own, whose checkpoint has MTP heads.
        num_steps: tokens ahead; default: as many as the chain has networks. Beyond those the last
            one is run again, with keys and values of its own. Elsewhere: speculative_num_steps.
        topk: most children of a node, and most nodes of a level that are expanded; 1: a chain of
            tokens. Elsewhere: speculative_eagle_topk.
        num_draft_tokens: most draft nodes per request and step, the root excluded. Elsewhere
            speculative_num_draft_tokens, which counts the root too.
        budget: ``learned``: as many as pay, none where none do. ``fixed``: as many as there are.
        min_probability: nodes less likely to be accepted are never drafted.
        calibration_seconds: for timing a few forwards as the engine starts, where no earlier run
            left its cost curve; 0: none, the curve is learned from the steps alone.
        frozen: a trainer's stream to selector ``all`` leaves the chain alone. Only a trainer that
            sends the chain with the target, by the checkpoint's names, wants it otherwise.
        lockstep: run the same forwards in every step, whatever the batch, so that ranks with
            collectives in them stay together; the budget is fixed then.

    Raises InvalidInputError, naming the option; CheckpointError and UnsupportedModelError for a
    chain that cannot be read.
    """
    # Before the model, which may take minutes to load: mistakes show at once.
    check_budget(budget)
    lockstep = lockstep or config.parallel.mode is ParallelMode.lockstep
    check_number("min_probability", min_probability, 1)
    check_number("calibration_seconds", calibration_seconds, 3600)
    target, drafter = open_chain(
        config,
        progress,
        draft_path=draft_path,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        frozen=frozen,
        lockstep=lockstep,
    )
    return MultiLayerEagleWorker(
        target,
        drafter,
        budget=(
            FixedBudget(min_probability)
            if lockstep or budget == "fixed"
            else LearnedBudget.for_target(target, drafter.sources, min_probability)
        ),
        calibration_seconds=calibration_seconds,
    )


def open_chain(
    config: EngineConfig,
    progress: Progress | None,
    *,
    draft_path: str | None,
    num_steps: int | None,
    topk: int,
    num_draft_tokens: int,
    frozen: bool,
    lockstep: bool,
) -> tuple[TargetWorker, MultiLayerEagleDrafter]:
    """A target and a chain that reads it, whose weights and KV are the target's to look after.

    See `build` for the options, and for what is raised, before the target is loaded.
    """
    check_number("num_draft_tokens", num_draft_tokens, MAX_TREE_NODES - 1, int)
    if num_steps is not None:
        check_number("num_steps", num_steps, MAX_TREE_NODES - 1, int, minimum=1)
    target_spec = ModelSpec.read(Path(config.model.path), config.model.max_context_len)
    try:
        chain = MtpChain.find(Path(draft_path or config.model.path), target_spec)
    except CheckpointError as error:
        if draft_path:
            raise
        raise CheckpointError(
            f"{error}; for a chain in a folder of its own, give spec.draft_path"
        ) from None
    depth = chain.spec.num_steps if num_steps is None else num_steps
    check_topk(topk, depth)
    target = TargetWorker(
        config,
        progress,
        features=chain.spec.features,
        draft_nodes=num_draft_tokens,
        draft_bytes=draft_bytes(
            config,
            target_spec,
            chain.spec,
            num_pools=depth,
            # Of step k the last k positions, and the nodes of a tree.
            slots_per_request=sum(k + topk * (depth - 1) for k in range(depth)),
        ),
    )
    networks = chain.load(target.model)[:depth]
    drafter = MultiLayerEagleDrafter(
        target,
        [networks[min(step, len(networks) - 1)] for step in range(depth)],
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        lockstep=lockstep,
        graphs=proposal_graphs(config.memory, target),
    )

    owners: dict[str, str] = {}  # of tensors, which steps may share

    def read(folder: Path, parts: frozenset[str]) -> CheckpointSource:
        found = MtpChain.find(folder, target_spec)
        names = found.tensors_for(networks)
        own = {stored: name for stored, name in names.items() if owners[name] in parts}
        return CheckpointSource.named(found.checkpoint, own)

    for step, network in enumerate(networks):
        part = f"draft_step_{step}"
        for name in network.weight_loaders():
            owners.setdefault(name, part)
        target.weights.parts.add(part, network, frozen=frozen, reader=read)
    for runner in drafter.runners:
        target.residency.add_kv_pool(runner.kv.pool)
    return target, drafter
