"""Drafts by a chain of networks: which trees grow, how large, and what the networks read.

EAGLE, EAGLE-2 (Li et al. 2024: dynamic trees) and EAGLE-3 (Li et al. 2025) are a chain of one: a
row joins the hidden state of a position to the token behind it, and tells of the token after that.
At known positions the hidden states are the target's; below, in the tree, the draft's own.

Multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2; Gloeckle et
al. 2024) has a network for each token ahead. Row i of runner k joins token i + k + 1 to the hidden
state of position i: the target's for runner 0, that of runner k - 1 after it. It tells of token
i + k + 2. So every runner reads a sequence of its own, and has keys and values of its own.

A block draft (DFlash, Chen et al. 2026) is a chain of one that reads known positions alike, and
proposes a whole tree in one forward (`block_proposer.py`).

Below the known tokens a tree's nodes stand in for those that follow (`draft_levels.py`). They go
into scratch slots; when the true tokens are known those positions are run again.

Legend: B entries, G entries whose trees grow, K runners, T rows, F columns of features, E hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.draft_model import DraftModel
from rollout.ops import gpu
from rollout.ops.transfers import upload
from rollout.types import Batch, DraftTrees, MemoryTag, Request, Scheduled
from spec_workers.draft_tree import only_roots, spread
from spec_workers.neural.block_proposer import BlockProposer
from spec_workers.neural.draft_extend import DraftExtension
from spec_workers.neural.draft_graphs import DraftGraphs
from spec_workers.neural.draft_kv import DraftKv
from spec_workers.neural.draft_levels import DraftLevels
from spec_workers.neural.draft_runner import DraftRunner
from spec_workers.neural.draft_state import DraftState
from spec_workers.neural.guesses import Guesser
from spec_workers.neural.tree_proposer import TreeProposer, TreesToGrow
from spec_workers.step.observation import Observation
from spec_workers.target import TargetWorker


class NeuralDrafter:
    """Proposes trees, and reads what the target computed of what was verified.

    Each runner has its own network, KV pool, ``req_to_token`` and plans.
    """

    def __init__(
        self,
        target: TargetWorker,
        models: Sequence[DraftModel],
        *,
        num_steps: int,
        topk: int,
        num_draft_tokens: int,
        lockstep: bool = False,
        graphs: DraftGraphs | None = None,
    ) -> None:
        """
        Args:
            target: whose features the draft reads. The draft's KV is made to go with the target's.
            models: one network, which runs its own hidden states further down, or one for each of
                ``num_steps``; one network may stand for several.
            num_steps: depth of a tree.
            topk: most children of a node, and most nodes of a level that are expanded.
            num_draft_tokens: most nodes of a tree.
            lockstep: every `propose` and `observe` enters the same forwards, whatever there is to
                run: other ranks wait in them.
            graphs: default: nothing is captured.
        """
        first, graphs = models[0], graphs or DraftGraphs()
        self.features: AuxHiddenStates = first.spec.features
        """The hidden states of the target that it reads."""
        self.sources = (first.spec.family.value,)
        """Names of the values of its trees' ``sources_N``."""
        self.max_draft_tokens = num_draft_tokens
        self.lockstep = lockstep
        self._target = target
        self._device = first.device
        self._num_steps = num_steps
        self._topk = topk
        rows, nodes_per_tree = (
            target.memory.req_to_token.max_rows,
            first.spec.nodes_per_tree(num_steps, topk),
        )
        with target.memory_saver.regions.region(MemoryTag.KV_CACHE):
            kvs = [
                DraftKv(
                    target.memory,
                    target.kv_pool,
                    model.spec,
                    num_scratch=rows * nodes_per_tree,
                    dtype=model.dtype,
                    device=model.device,
                    horizon=k + 1,
                )
                for k, model in enumerate(models)
            ]
        self.runners = [
            DraftRunner(
                model,
                kv,
                number=k,
                minimum_rows=target.minimum_rows,
                nodes_per_tree=nodes_per_tree,
                graphs=graphs.forwards,
            )
            for k, (model, kv) in enumerate(zip(models, kvs, strict=True))
        ]
        like = torch.empty(0, dtype=first.dtype, device=first.device)
        self._state = DraftState(rows, len(models), first.spec.hidden_size, like)
        self._guesser = Guesser(topk, num_steps, first.token_ids_D)
        on_device = gpu.runs_on(self._device)
        # On a device shapes are fixed, and ranks in lockstep run the same levels.
        self._chooses_levels = not on_device and not lockstep
        self._proposer = self._make_proposer(graphs, on_host=not on_device)
        self.is_warm = True
        """Whether the timing of the last `propose`, and of `observe` since, is steady-state: the
        first ones of a shape compile kernels and capture graphs."""
        self._counters = dict.fromkeys(("extended", "nodes", "levels", "trees"), 0)

    def propose(
        self,
        batch: Batch,
        floors_B: NDArray[np.float64],
        entries: Collection[int] | None = None,
        token_ms_B: NDArray[np.float64] | None = None,
    ) -> DraftTrees:
        """Each entry's most probable nodes first.

        Args:
            floors_B: as of `SpecWorker.propose`.
            entries: of the batch, those for which trees are wanted; default: all that sample.
            token_ms_B: that an accepted token of each entry saves: on a CPU, levels that bring less
                than they take are left out. Default: none is.
        """
        self.is_warm = True
        has_root_B, pays_B = self._has_root(batch), (floors_B <= 1.0).tolist()
        growing = [
            b
            for b, entry in enumerate(batch.entries)
            if (entries is None or b in entries)
            and entry.samples
            and len(entry.draft_slots)
            and has_root_B[b]
            and pays_B[b]
        ]
        if not growing and not self.lockstep:
            return only_roots(len(batch.entries))
        wanted = self._trees_to_grow(batch, growing, float(floors_B[growing].min(initial=1.0)))
        if token_ms_B is not None and self._chooses_levels:
            wanted = replace(wanted, token_ms_G=token_ms_B[growing])
        proposal = self._proposer.propose(wanted)
        self._guesser.remember(proposal)
        self.is_warm &= self._proposer.is_warm
        self._counters["trees"] += len(growing)
        self._counters["levels"] += proposal.num_levels
        self._counters["nodes"] += proposal.num_nodes
        trees = proposal.trees(wanted.sizes_G, source=0)
        return spread(trees, growing, len(batch.entries))

    @torch.inference_mode()
    def observe(self, step: Observation, *, prompts_alone: bool = False) -> None:
        """Draft-extend: run the positions the target computed in this step.

        Positions that are not run are holes, to which the draft does not attend.
        ``prompts_alone``: run prompts and no decoded tokens. A cached prompt is never run again, so
        a draft that is not asked at present must read it all the same.
        """
        requests = [entry.request for entry in step.batch.entries]
        extension = DraftExtension(step, len(self.runners), prompts_alone=prompts_alone)
        last_BK = self._state.last(requests)
        self._state.begin(requests)
        sent = upload(
            {"rows": extension.runs.rows_B, "query_rows": extension.sources_T}, self._device
        )
        features_TF = step.forwarded.features_TF[sent["query_rows"]]
        features_TF = self._target.runner.features.select(features_TF, self.features)
        inputs_TE = self.runners[0].fuse(features_TF)
        for k, runner in enumerate(self.runners):
            is_last = k + 1 == len(self.runners)
            runs = extension.runs
            hidden_TE = runner.extend(runs, inputs_TE, last_alone=is_last)
            self.is_warm &= runner.is_warm
            any_B = runs.lens_B > 0
            positions_B = extension.ends_B[any_B] - 1
            index = {"rows": runs.rows_B[any_B]}
            if not is_last:
                extension.advance(last_BK[:, k], last_BK[:, k + 1])
                index["last_rows"] = np.cumsum(runs.lens_B)[any_B] - 1
                index["sources"] = extension.sources_T
            own = upload(index, self._device)
            last_BE = hidden_TE
            if not is_last:
                last_BE = hidden_TE[own["last_rows"]]
                stored_BE = self._state.hidden(k, sent["rows"])  # before it is overwritten
                inputs_TE = torch.cat([hidden_TE, stored_BE])[own["sources"]]
            self._state.store(k, index["rows"], positions_B, own["rows"], last_BE)
        self._guesser.learn(step.batch, step.results)
        self._counters["extended"] += len(features_TF)

    def release(self, request: Request) -> None:
        self._state.forget_request(request)

    def weights_changed(self) -> None:
        """The target's or the draft's weights changed: nothing computed with the old ones is read
        again."""
        self._state.forget()
        for runner in self.runners:
            runner.kv.forget()

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise IntegrityError if a runner's KV contradicts the target's."""
        for runner in self.runners:
            runner.kv.check_integrity(running)

    def counters(self) -> dict[str, float]:
        """Positions extended; trees grown, levels and nodes run for them. Over its life."""
        return {f"draft/{name}": float(count) for name, count in self._counters.items()}

    def _make_proposer(self, graphs: DraftGraphs, *, on_host: bool) -> TreeProposer:
        levels = DraftLevels(
            self.runners,
            self._state,
            topk=self._topk,
            num_steps=self._num_steps,
            on_host=on_host,
        )
        make = BlockProposer if self.runners[0].model.spec.block_size > 1 else TreeProposer
        return make(
            levels,
            self._guesser,
            topk=self._topk,
            num_steps=self._num_steps,
            device=self._device,
            on_host=on_host,
            lockstep=self.lockstep,
            graphs=graphs.proposals,
            max_trees=graphs.max_trees,
        )

    def _has_root(self, batch: Batch) -> list[bool]:
        """Whether each entry runs its last token alone, and the state before it is stored."""
        last_BK = self._state.last([entry.request for entry in batch.entries])
        return [
            entry.run_len == 1 and bool(last == entry.end - 2)
            for entry, last in zip(batch.entries, last_BK[:, 0], strict=True)
        ]

    def _trees_to_grow(self, batch: Batch, growing: list[int], floor: float) -> TreesToGrow:
        entries = [batch.entries[b] for b in growing]
        rows_G = np.array([entry.request.row for entry in entries], dtype=np.int64)
        ends_G = np.array([entry.end for entry in entries], dtype=np.int64)
        sizes_G = np.array([len(entry.draft_slots) for entry in entries], dtype=np.int64)
        reach_G = self._reach(entries, rows_G, ends_G)
        return TreesToGrow(
            batch=batch,
            entries_G=growing,
            rows_G=rows_G,
            ends_G=ends_G,
            sizes_G=np.where(reach_G > 0, np.minimum(sizes_G, self.max_draft_tokens), 0),
            depths_G=np.minimum(sizes_G, reach_G),
            floor=floor,
        )

    def _reach(
        self, entries: Sequence[Scheduled], rows_G: NDArray[np.int64], ends_G: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Levels that each tree can have; their rows are followed from now on.

        Below its first level a tree needs something to attend to, a block's from the first on; and
        in a chain the hidden state that its first nodes take of the runner before.
        """
        tokens_G = [entry.request.tokens for entry in entries]
        if len(self.runners) == 1:
            kv = self.runners[0].kv
            kv.follow(rows_G, ends_G - 1, tokens_G)
            alone = 1 if self.runners[0].model.spec.block_size == 1 else 0
            return np.where(kv.lens_Q[rows_G] > 0, self._num_steps, alone)
        last_GK = self._state.last([entry.request for entry in entries])
        reach_G = np.ones(len(entries), dtype=np.int64)
        goes_on_G = np.ones(len(entries), dtype=bool)
        for k in range(1, len(self.runners)):
            kv, first_G = self.runners[k].kv, ends_G - 1 - k
            kv.follow(rows_G, np.maximum(first_G, 0), tokens_G)
            goes_on_G &= (last_GK[:, k - 1] == first_G) & (kv.lens_Q[rows_G] > 0)
            reach_G += goes_on_G
        return reach_G
