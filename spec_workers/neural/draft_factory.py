"""Opens a target and the networks of a neural draft that reads it, from the draft's folder.

The draft's weights and KV are the target's to look after. Mistakes show before the target is
loaded, which may take minutes: InvalidInputError names the option; CheckpointError and
UnsupportedModelError are for a draft that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout.config import EngineConfig
from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoint import Progress
from rollout.models.draft_model import DraftModel, DraftSpec
from rollout.models.eagle.loader import load_eagle, read_eagle_spec, tensors_for
from rollout.models.mtp.loader import MtpChain
from rollout.models.spec import ModelSpec
from rollout.types import MAX_TREE_NODES
from rollout.weights.checkpoint_source import CheckpointSource
from spec_workers.neural.draft_graphs import DraftGraphs
from spec_workers.neural.drafter import NeuralDrafter
from spec_workers.options import NeuralOptions, check_topk
from spec_workers.target import TargetWorker
from spec_workers.target.draft_sizing import draft_bytes

Reader = Callable[[Path, frozenset[str]], CheckpointSource]
"""Reads the checkpoint tensors of the named parts from a folder."""

Load = Callable[[CausalLM], tuple[dict[str, DraftModel], Reader]]
"""Loads the draft's networks for a target's model, by part name, with a reader for their
updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuralModels:
    """A target and the networks that draft for it, which are parts of its weights."""

    target: TargetWorker
    networks: list[DraftModel]  # one for each runner; some may be the same
    num_steps: int
    topk: int

    def drafter(self, config: EngineConfig, options: NeuralOptions) -> NeuralDrafter:
        """What drafts with them, with keys and values of its own."""
        drafter = NeuralDrafter(
            self.target,
            self.networks,
            num_steps=self.num_steps,
            topk=self.topk,
            num_draft_tokens=options.num_draft_tokens,
            lockstep=options.runs_in_lockstep(config),
            graphs=DraftGraphs.of(config.memory, self.target, self.networks),
        )
        for runner in drafter.runners:
            self.target.memory_saver.add_kv_pool(runner.kv.pool)
        return drafter


def open_eagle(
    config: EngineConfig, progress: Progress | None, options: NeuralOptions
) -> NeuralModels:
    """A target with an EAGLE, EAGLE-2, EAGLE-3 or DFlash draft: its checkpoint decides which."""
    path = options.draft_path
    assert path is not None, "EagleOptions ask for it"
    target_spec = _target_spec(config)
    spec = read_eagle_spec(path, target_spec)
    num_steps, topk = options.num_steps, options.topk
    reach = spec.block_size - 1  # of a block
    if reach and num_steps is not None and num_steps > reach:
        raise InvalidInputError(
            "spec.num_steps",
            num_steps,
            f"the draft's block guesses {reach} tokens: at most so many",
        )
    if num_steps is None:
        num_steps = reach or 4
    if topk is None:
        topk = min(4, (MAX_TREE_NODES - 1) // max(1, num_steps - 1))
    if topk > spec.draft_vocab_size:
        raise InvalidInputError(
            "spec.topk", topk, f"the draft has {spec.draft_vocab_size} tokens: at most so many"
        )

    def load(target: CausalLM) -> tuple[dict[str, DraftModel], Reader]:
        model = load_eagle(path, target)

        def read(folder: Path, parts: frozenset[str]) -> CheckpointSource:
            return CheckpointSource.named(*tensors_for(folder, model, target))

        return {"draft": model}, read

    return _opened(
        config,
        progress,
        options,
        target_spec,
        spec,
        load,
        num_steps=num_steps,
        topk=topk,
        num_runners=1,
    )


def open_chain(
    config: EngineConfig, progress: Progress | None, options: NeuralOptions
) -> NeuralModels:
    """A target with an MTP chain: that of a folder of its own, or of the target's checkpoint."""
    target_spec = _target_spec(config)
    try:
        chain = MtpChain.find(Path(options.draft_path or config.model.path), target_spec)
    except CheckpointError as error:
        if options.draft_path:
            raise
        raise CheckpointError(
            f"{error}; spec.draft_path names a chain in a folder of its own, and with spec=hybrid "
            "an EAGLE or block draft"
        ) from None
    num_steps = chain.spec.num_steps if options.num_steps is None else options.num_steps

    def load(target: CausalLM) -> tuple[dict[str, DraftModel], Reader]:
        networks = chain.load(target)[:num_steps]
        own = {f"draft_step_{step}": network for step, network in enumerate(networks)}
        owners: dict[str, str] = {}  # of tensors, which steps may share
        for part, network in own.items():
            for name in network.weight_loaders():
                owners.setdefault(name, part)

        def read(folder: Path, parts: frozenset[str]) -> CheckpointSource:
            found = MtpChain.find(folder, target_spec)
            names = found.tensors_for(networks)
            read_names = {stored: name for stored, name in names.items() if owners[name] in parts}
            return CheckpointSource.named(found.checkpoint, read_names)

        return dict(own), read

    return _opened(
        config,
        progress,
        options,
        target_spec,
        chain.spec,
        load,
        num_steps=num_steps,
        topk=1 if options.topk is None else options.topk,
        num_runners=num_steps,
    )


def _target_spec(config: EngineConfig) -> ModelSpec:
    return ModelSpec.read(Path(config.model.path), config.model.max_context_len)


def _opened(
    config: EngineConfig,
    progress: Progress | None,
    options: NeuralOptions,
    target_spec: ModelSpec,
    spec: DraftSpec,
    load: Load,
    *,
    num_steps: int,
    topk: int,
    num_runners: int,
) -> NeuralModels:
    check_topk(topk, num_steps)
    target = TargetWorker(
        config,
        progress,
        features=spec.features,
        draft_nodes=options.num_draft_tokens,
        draft_bytes=draft_bytes(
            config,
            target_spec,
            spec,
            num_pools=num_runners,
            # The nodes of a tree, and of runner k the last k positions.
            slots_per_request=sum(
                k + spec.nodes_per_tree(num_steps, topk) for k in range(num_runners)
            ),
        ),
    )
    with target.ranks.all_or_none("while it started"):
        parts, reader = load(target.model)
    networks = list(parts.values())
    for name, network in parts.items():
        target.weights.parts.add(name, network, frozen=options.frozen, reader=reader)
    return NeuralModels(
        target=target,
        networks=[networks[min(k, len(networks) - 1)] for k in range(num_runners)],
        num_steps=num_steps,
        topk=topk,
    )
