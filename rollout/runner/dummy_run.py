"""Steps of padding rows alone, in memory of their own: they need no KV and leave no trace.

They launch what any other step does, and take as much memory: what kernels are compiled for and
what torch allocates depend on shapes alone.

Legend: T query rows, R rows that are sampled from, V vocabulary.
"""

from __future__ import annotations

import torch

from rollout.memory.kv_pool import KvPool
from rollout.memory.state_pool import StatePool
from rollout.models.aux_hidden_states import AuxHiddenStateCollector, AuxHiddenStates
from rollout.models.causal_lm import CausalLM
from rollout.models.forward_context import StepAttention
from rollout.ops import gpu, tree_accept
from rollout.ops.categorical import categorical, entropy, token_logprobs
from rollout.ops.gated_delta_rule.chunked import ChunkedKernel, ChunkedPlan, chunked_plan
from rollout.ops.gated_delta_rule.fla import chunked_kernel
from rollout.ops.paged_attention import AttentionPlan
from rollout.ops.state_plan import NO_STATE, StatePlan
from rollout.ops.truncation import truncation_threshold
from rollout.ops.uniforms import uniforms
from rollout.runner.logit_blocks import logit_blocks
from rollout.runner.step_states import StepStates


class DummyRun:
    """Runs and samples padding rows through a model."""

    def __init__(
        self, model: CausalLM, features: AuxHiddenStates | None = None, *, exact: bool = True
    ) -> None:
        """``features``: what every step keeps. ``exact``: long runs are not computed in chunks."""
        self.model = model
        self._features = features or AuxHiddenStates()
        spec, self._device = model.spec, model.device
        self._table = torch.zeros((1, spec.max_context_len), dtype=torch.int32, device=self._device)
        self._kv = KvPool(
            num_layers=len(spec.attention_layers),
            num_slots=1,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            has_values=spec.latent is None,
            dtype=model.dtype,
            device=self._device,
        )
        self._states: StatePool | None = None
        self.chunked_kernel: ChunkedKernel | None = None  # for long runs of recurrent layers
        if spec.linear_attention is not None:
            self._states = StatePool(
                spec.linear_attention, num_slots=1, dtype=model.dtype, device=self._device
            )
            if not exact:
                with gpu.on(self._device):
                    self.chunked_kernel = chunked_kernel(self._states.recurrent[0], model.dtype)

    @torch.inference_mode()
    def forward(self, rows: int, *, nodes: int = 0) -> torch.Tensor:
        """Hidden states [T, E] of a step with room for so many draft nodes."""
        spec, zeros_T = self.model.spec, self._zeros(rows, torch.int64)
        attention = StepAttention(
            keys=self._kv.keys,
            values=self._kv.values,
            slots_T=zeros_T,
            plan=self._attention_plan(nodes),
            scale=spec.attention_scale,
        )
        collector = None
        if self._features.count:
            like = torch.empty(0, dtype=self.model.dtype, device=self._device)
            collector = AuxHiddenStateCollector(self._features, rows, spec.hidden_size, like)
        return self.model.forward(
            zeros_T, zeros_T, attention, collector, states=self._recurrent(rows)
        )

    @torch.inference_mode()
    def sample(self, hidden_TE: torch.Tensor, rows: int) -> None:
        """Sample from the first ``rows`` hidden states, in blocks, with every option: edited logits
        and banned tokens, truncated and not."""
        for block in logit_blocks(rows):
            self._sample_block(self.model.logits(hidden_TE[block]))

    def _sample_block(self, logits_RV: torch.Tensor) -> None:
        rows = len(logits_RV)
        edited_RV = logits_RV.to(torch.float32, copy=True)
        drawn_from_RV = edited_RV.clone()
        ones_R = torch.ones(rows, device=self._device)
        zeros_R = self._zeros(rows, torch.int64)
        uniforms_R = uniforms(zeros_R, zeros_R)
        for each_RV in (logits_RV, drawn_from_RV):
            threshold_R = truncation_threshold(each_RV, ones_R, zeros_R, ones_R, ones_R)
            for cut_R in (None, threshold_R):
                tokens_R, _ = categorical(each_RV, ones_R, uniforms_R, cut_R)
            token_logprobs(each_RV, ones_R, tokens_R)
            entropy(each_RV, ones_R)
        none, zeros = self._zeros(0, torch.int32), self._zeros(2, torch.int32)
        tree_accept.accept(tokens_R, zeros, none, none, none.long(), zeros)

    def _attention_plan(self, nodes: int) -> AttentionPlan:
        none, zero = self._zeros(0, torch.int32), self._zeros(1, torch.int32)
        return AttentionPlan(
            req_to_token=self._table,
            rows_B=none,
            q_offsets_B1=zero,
            starts_B=none,
            run_lens_B=none,
            node_offsets_B1=zero,
            node_masks_N=self._zeros(nodes, torch.int64),
            node_slots_N=self._zeros(nodes, torch.int32),
        )

    def _recurrent(self, rows: int) -> StepStates | None:
        if self._states is None:
            return None
        zeros_T = self._zeros(rows, torch.int32)
        plan = StatePlan(
            q_offsets_B1=self._zeros(1, torch.int32),
            sources_B=self._zeros(0, torch.int32),
            parents_T=zeros_T - 1,
            targets_T=zeros_T + NO_STATE,
        )
        return StepStates(
            convolutions=self._states.convolutions,
            recurrent=self._states.recurrent,
            plan=plan,
            chunks=self._chunks(rows),
        )

    def _chunks(self, rows: int) -> ChunkedPlan | None:
        """All rows as one run, the first of slot 1."""
        if self.chunked_kernel is None:
            return None
        targets_T = torch.zeros(rows, dtype=torch.int32)
        targets_T[-1] = 1
        run = StatePlan(
            q_offsets_B1=torch.tensor([0, rows], dtype=torch.int32),
            sources_B=torch.tensor([NO_STATE], dtype=torch.int32),
            parents_T=torch.arange(-1, rows - 1, dtype=torch.int32),
            targets_T=targets_T,
        )
        return chunked_plan(run, self._device, self.chunked_kernel)

    def _zeros(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype, device=self._device)
