"""`compare`: a trainer's model and an engine on the same rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn

from rollout.engine.engine import RolloutEngine
from rollout.errors import InvalidInputError
from rollout.models.causal_lm import CausalLM
from rollout.trainers.exact.forward import ARCHITECTURES, transformers_model
from rollout.trainers.mismatch.differences import OpDifferences
from rollout.trainers.mismatch.engine_ops import EngineOps
from rollout.trainers.mismatch.op_probe import OpProbe
from rollout.trainers.mismatch.result import Cause, Mismatch, OpDifference, Suspect
from rollout.trainers.mismatch.sampling import MAX_ROWS, sampling_suspects
from rollout.trainers.mismatch.suspects import (
    attention_suspects,
    in_order,
    op_suspects,
    position_suspects,
    rounding_suspect,
    setting_suspects,
)
from rollout.trainers.mismatch.tokens import TokenDifferences, rows_per_block
from rollout.trainers.mismatch.trainer_forward import TrainerForward
from rollout.trainers.mismatch.weights import differing_tensors
from rollout.types import Rollout, SamplingParams

_FLOAT32_NOISE = 1e-3  # of logprobs: less is no mismatch in float32
_Columns = tuple[list[int], list[int], list[float], list[int]]
"""Prompt, output, logprobs (NaN: none) and weight versions of a rollout."""


def compare(
    model: nn.Module,
    engine: RolloutEngine,
    rollouts: Sequence[Rollout | Mapping[str, Any]],
    *,
    temperature: float = 1.0,
    op_rollouts: int = 2,
    left_padding: int = 0,
) -> Mismatch:
    """Compare a trainer's logprobs with an engine's, op by op, and name what parts them.

    The model runs as it is, in its mode, one rollout at a time, without gradients. Nothing of model
    or engine is changed; the engine's prefix cache takes in what is scored.

    Args:
        model: a transformers causal language model, or what wraps one. Ops are compared of the
            architectures that exact training knows.
        engine: on one rank, in this process.
        rollouts: of an engine, or rows of a job's file that have ``prompt_ids``.
        temperature: that the trainer divides logits by; 0 is 1.
        op_rollouts: so many of them have their ops compared, 1,024 tokens each at most.
        left_padding: rows of padding before each sequence, with a mask, as trainers pad.

    Raises InvalidInputError for an engine of several ranks, an empty list, a rollout without prompt
    or tokens, and a model that is none.
    """
    started = time.perf_counter()
    compared = _Comparison(model, engine, temperature, left_padding)
    checked = [_columns(index, rollout) for index, rollout in enumerate(rollouts)]
    if not checked:
        raise InvalidInputError("rollouts", [], "must have at least one rollout")
    for index, columns in enumerate(checked):
        compared.add(columns, with_ops=index < op_rollouts)
    return compared.result(len(checked), started)


class _Comparison:
    def __init__(
        self, model: nn.Module, engine: RolloutEngine, temperature: float, left_padding: int
    ) -> None:
        if not isinstance(engine, RolloutEngine) or engine.worker.ranks.all.size > 1:
            kind = type(engine).__name__
            raise InvalidInputError("engine", kind, "must be a RolloutEngine on one rank")
        if left_padding < 0:
            raise InvalidInputError("left_padding", left_padding, "must be >= 0")
        self._model, self._engine, self._first = model, engine, left_padding
        self._target = target = transformers_model(model)
        kind = type(target).__name__.removeprefix("FSDP")  # FSDP2 derives its own
        if not hasattr(target, "base_model"):
            raise InvalidInputError("model", kind, "must be a transformers causal language model")
        self._own = own = cast(CausalLM, engine.worker.weights.parts["target"])
        self._forward = TrainerForward(model, target, left_padding)
        self._params = SamplingParams(temperature=temperature)
        self._tokens = TokenDifferences(temperature)
        self._dtype = max((own.dtype, target.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        self._differences = OpDifferences(self._dtype)
        self._probe: OpProbe | None = None
        if kind in ARCHITECTURES and own.spec.architecture == kind:
            self._probe = OpProbe(target, EngineOps(own), self._differences)
        self._kept: list[tuple[torch.Tensor, int, float]] = []  # logits, token, rollout's logprob

    def add(self, columns: _Columns, *, with_ops: bool) -> None:
        """Compare one rollout."""
        prompt, output, recorded, versions = columns
        tokens, probe, done = self._tokens, self._probe if with_ops else None, 0
        with nullcontext() if probe is None else probe.watching(self._first):
            self._forward.run(prompt + output)
        step, first = rows_per_block(self._own.spec.vocab_size), len(prompt) - 1

        def observe(logits_RV: torch.Tensor) -> None:
            nonlocal done
            for engine_RV in logits_RV.split(step):
                part = slice(done, done + len(engine_RV))
                rows_R = torch.arange(first + part.start, first + part.stop)
                with torch.inference_mode(False), torch.no_grad():
                    trainer_RV = self._logits(rows_R, probe if done == 0 else None)
                tokens.add_block(trainer_RV, engine_RV, output[part])
                self._keep(engine_RV, output[part], recorded[part], versions[part])
                done = part.stop

        tokens.engine += self._engine.score_with_extras(prompt, output, self._params, observe)[0]
        tokens.recorded += recorded
        tokens.versions += versions
        tokens.positions += range(len(output))

    def _logits(self, rows_R: torch.Tensor, probe: OpProbe | None) -> torch.Tensor:
        if probe is None:
            return self._forward.logits(rows_R)[1]
        with probe.watching(self._first):
            hidden_RE, logits_RV = self._forward.logits(rows_R)
        probe.compare_head(hidden_RE, logits_RV)
        return logits_RV

    def _keep(self, rows_RV: torch.Tensor, *of_tokens: Sequence[Any]) -> None:
        """Keep rows of the engine's present version, to fit the rollouts' temperature."""
        for row_V, token, logprob, version in zip(rows_RV, *of_tokens, strict=True):
            is_current = version == self._engine.weight_version and logprob == logprob
            if is_current and len(self._kept) < MAX_ROWS:
                self._kept.append((row_V.float().clone(), token, logprob))

    def result(self, num_rollouts: int, started: float) -> Mismatch:
        tokens, ops = self._tokens, self._differences.listed()
        apart_N = tokens.differences().abs()
        own_N = tokens.own_differences(self._engine.weight_version)
        return Mismatch(
            rollouts=num_rollouts,
            tokens=len(apart_N),
            max_difference=apart_N.max().item(),
            mean_difference=apart_N.mean().item(),
            max_logit_difference=tokens.max_logit_difference,
            engine_difference=own_N.abs().max().item() if len(own_N) else 0.0,
            ratio=tokens.ratio(),
            divergence=tokens.divergence(),
            entropy=tokens.mean_entropies(),
            flips=tokens.flips / len(apart_N),
            by_position=tokens.by_position(),
            by_version=tokens.by_version(),
            ratios=tokens.histogram(),
            ops=ops,
            suspects=in_order(list(self._suspects(ops, apart_N.max().item(), own_N))),
            seconds=time.perf_counter() - started,
            notes=[] if ops else [f"ops are compared of {', '.join(ARCHITECTURES)} alone"],
        )

    def _suspects(
        self, ops: Sequence[OpDifference], largest: float, own_N: torch.Tensor
    ) -> Iterator[Suspect]:
        target, probe = self._target, self._probe
        tensors = list(differing_tensors(self._model, self._own.weight_loaders()))
        found = [*setting_suspects(self._model, target, self._own), *tensors]
        implementation = target.config._attn_implementation
        found += op_suspects(ops, tensors, implementation)
        if probe is not None:
            found += position_suspects(probe.positions_T)
            if probe.dropout:
                text = f"attention drops {probe.dropout:g} of its weights"
                found.append(Suspect(Cause.DROPOUT, "attention_dropout", text))
        if self._kept:
            rows, ids, logprobs = zip(*self._kept, strict=True)
            logits_RV, temperature = torch.stack(rows), self._tokens.temperature or 1.0
            ids_R, recorded_R = torch.tensor(ids), torch.tensor(logprobs)
            given = own_N, logits_RV.cpu(), ids_R, recorded_R, temperature
            found += sampling_suspects(*given)
        yield from found
        is_wide = torch.finfo(self._dtype).bits > 16
        if not found and largest > (_FLOAT32_NOISE if is_wide else 0.0):
            yield rounding_suspect(ops, self._dtype)
            if probe is not None and not is_wide:
                yield from attention_suspects(probe.attention_squares, implementation)


def _columns(index: int, rollout: Rollout | Mapping[str, Any]) -> _Columns:
    def read(name: str) -> list[Any]:
        of_row = rollout.get(name) if isinstance(rollout, Mapping) else getattr(rollout, name)
        return list(of_row or ())

    prompt, output = read("prompt_ids"), read("token_ids")
    if not prompt:
        remedy = "is missing: write it with output.prompt_ids=true"
        raise InvalidInputError(f"rollouts[{index}].prompt_ids", prompt, remedy)
    if not output:
        raise InvalidInputError(f"rollouts[{index}].token_ids", output, "must have a token")
    nothing = [float("nan")] * len(output)
    return prompt, output, read("logprobs") or nothing, read("weight_versions") or [0] * len(output)
