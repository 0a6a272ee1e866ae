"""The sampler on the CPU: plain torch around the ops, row by row where rows differ.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.ops.categorical import categorical, entropy, token_logprobs
from rollout.ops.truncation import truncation_threshold
from rollout.ops.uniforms import uniforms
from rollout.sampling.likeliest import likeliest
from rollout.sampling.penalties import apply_history_, changes_logits
from rollout.sampling.row_inputs import noise_arrays
from rollout.sampling.rows import SampleRows
from rollout.sampling.sampled import Sampled
from rollout.types import NO_EXTRAS, SamplingParams, TokenExtras


def sample(logits_RV: torch.Tensor, rows: SampleRows) -> Sampled:
    shaped = _Shaped(logits_RV, rows)
    inputs = noise_arrays(rows)
    uniforms_R = uniforms(*(torch.from_numpy(inputs[name]) for name in ("seeds", "positions")))
    uniforms_R = uniforms_R.to(logits_RV.device)
    tokens_R = torch.empty(len(rows.requests), dtype=torch.int64, device=logits_RV.device)
    logprobs_R = torch.empty(len(rows.requests), dtype=torch.float32, device=logits_RV.device)
    for part in shaped.parts:
        noise = uniforms_R[part.index]
        tokens, logprobs = categorical(part.sampled_from, part.temperature, noise)
        if part.sampled_from is not part.logits:
            logprobs = token_logprobs(part.logits, part.temperature, tokens.clamp(min=0))
        tokens_R[part.index] = tokens
        logprobs_R[part.index] = logprobs
    extras = shaped.extras(tokens_R.clamp(min=0))
    return Sampled(tokens=tokens_R.tolist(), logprobs=logprobs_R.tolist(), extras=extras)


def score(logits_RV: torch.Tensor, rows: SampleRows, token_ids: list[int]) -> Sampled:
    shaped = _Shaped(logits_RV, rows)
    tokens_R = torch.tensor(token_ids, dtype=torch.int64, device=logits_RV.device)
    logprobs_R = torch.empty(len(token_ids), dtype=torch.float32, device=logits_RV.device)
    for part in shaped.parts:
        chosen = tokens_R[part.index]
        logprobs_R[part.index] = token_logprobs(part.logits, part.temperature, chosen)
    return Sampled(tokens=token_ids, logprobs=logprobs_R.tolist(), extras=shaped.extras(tokens_R))


@dataclass(kw_only=True, slots=True)
class _Part:
    """Rows handled together; how a row is handled depends on its own parameters alone."""

    index: torch.Tensor  # int64, rows of the step
    logits: torch.Tensor  # penalties and bias applied: what `logprobs` is taken from
    sampled_from: torch.Tensor  # truncation and minimum length applied too
    temperature: torch.Tensor


class _Shaped:
    def __init__(self, logits_RV: torch.Tensor, rows: SampleRows) -> None:
        self.raw_RV = logits_RV
        self.rows = rows
        self.device = logits_RV.device
        shaped = [r for r in range(len(rows.requests)) if self._is_shaped(r)]
        plain = sorted(set(range(len(rows.requests))) - set(shaped)) if shaped else None
        self.parts: list[_Part] = []
        if plain is None:
            everything = torch.arange(len(rows.requests), device=self.device)
            self.parts.append(self._plain_part(logits_RV, everything, self._params(everything)))
        else:
            if plain:
                index = torch.tensor(plain, device=self.device)
                self.parts.append(self._plain_part(logits_RV[index], index, self._params(index)))
            self.parts.append(self._shaped_part(torch.tensor(shaped, device=self.device)))

    def _params(self, index: torch.Tensor) -> list[SamplingParams]:
        return [self.rows.requests[r].params for r in index.tolist()]

    def _below_minimum(self, row: int) -> bool:
        request = self.rows.requests[row]
        return self.rows.generated_len(row) < request.params.min_new_tokens

    def _is_shaped(self, row: int) -> bool:
        params = self.rows.requests[row].params
        return params.truncates or changes_logits(params) or self._below_minimum(row)

    def _tensor(self, values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _plain_part(
        self, logits: torch.Tensor, index: torch.Tensor, params: list[SamplingParams]
    ) -> _Part:
        temperature = self._tensor([p.temperature for p in params], torch.float32)
        return _Part(index=index, logits=logits, sampled_from=logits, temperature=temperature)

    def _shaped_part(self, index: torch.Tensor) -> _Part:
        logits = self.raw_RV[index].float()
        params = self._params(index)
        temperature = self._tensor([p.temperature for p in params], torch.float32)
        row_ids = index.tolist()
        for local, row in enumerate(row_ids):
            if changes_logits(params[local]):
                apply_history_(logits[local], self.rows, row)
        sampled_from = logits.clone()
        for local, row in enumerate(row_ids):
            if self._below_minimum(row):
                stops = sorted(self.rows.requests[row].stop_check.stop_token_ids)
                sampled_from[local, stops] = float("-inf")
        if any(p.truncates for p in params):
            threshold = truncation_threshold(
                sampled_from,
                temperature,
                self._tensor([p.top_k for p in params], torch.int64),
                self._tensor([p.top_p for p in params], torch.float32),
                self._tensor([p.min_p for p in params], torch.float32),
            )
            sampled_from.masked_fill_(sampled_from < threshold[:, None], float("-inf"))
        return _Part(index=index, logits=logits, sampled_from=sampled_from, temperature=temperature)

    def extras(self, tokens_R: torch.Tensor) -> list[TokenExtras]:
        """The extra numbers each row's request asked for, about the token chosen there."""
        extras = [NO_EXTRAS] * len(self.rows.requests)
        if not any(request.params.wants_extras for request in self.rows.owners):
            return extras
        for part in self.parts:
            for local, row in enumerate(part.index.tolist()):
                params = self.rows.requests[row].params
                if params.wants_extras:
                    extras[row] = TokenExtras()
                    self._fill(extras[row], part, local, row, params, tokens_R[row : row + 1])
        return extras

    def _fill(
        self,
        extra: TokenExtras,
        part: _Part,
        local: int,
        row: int,
        params: SamplingParams,
        token: torch.Tensor,
    ) -> None:
        one = slice(local, local + 1)
        temperature = part.temperature[one]
        if params.raw_logprobs:
            at_one = torch.ones_like(temperature)
            extra.raw_logprobs = token_logprobs(self.raw_RV[row : row + 1], at_one, token).tolist()
        if params.sampling_logprobs:
            extra.sampling_logprobs = token_logprobs(
                part.sampled_from[one], temperature, token
            ).tolist()
        if params.top_logprobs:
            logits = part.logits[one]
            ids = likeliest(logits, params.top_logprobs)[0]
            count = len(ids)
            repeated = logits.expand(count, -1).contiguous()
            values = token_logprobs(repeated, temperature.expand(count).contiguous(), ids)
            extra.top_logprobs = [list(zip(ids.tolist(), values.tolist(), strict=True))]
        if params.entropy:
            extra.entropies = entropy(part.logits[one], temperature).tolist()
