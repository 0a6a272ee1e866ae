"""`compare`: a trainer's model and an engine on the same rollouts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
from rollout.trainers.mismatch.result import Cause, Mismatch, Suspect
from rollout.trainers.mismatch.sampling import MAX_ROWS, sampling_suspect
from rollout.trainers.mismatch.suspects import (
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
        engine: on one rank, in this process, with no request unfinished.
        rollouts: of an engine, or rows of a job's file that have ``prompt_ids``.
        temperature: that the trainer divides logits by; 0 is 1.
        op_rollouts: so many of them have their ops compared, 1,024 tokens each at most.
        left_padding: rows of padding before each sequence, with a mask, as trainers pad.

    Raises InvalidInputError for an engine of several ranks, an empty list, a rollout without prompt
    or tokens, and a model that is none.
    """
    started = time.perf_counter()
    compared = _Comparison(model, engine, temperature, left_padding)
    checked = [_tokens(index, rollout) for index, rollout in enumerate(rollouts)]
    if not checked:
        raise InvalidInputError("rollouts", [], "must have at least one rollout")
    for index, rollout in enumerate(checked):
        compared.add(*rollout, with_ops=index < op_rollouts)
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
        if not hasattr(target, "base_model"):
            remedy = "must be a transformers causal language model"
            raise InvalidInputError("model", type(target).__name__, remedy)
        self._own = own = cast(CausalLM, engine.worker.weights.parts["target"])
        self._forward = TrainerForward(model, target, left_padding)
        self._params = SamplingParams(temperature=temperature)
        self._tokens = TokenDifferences(temperature)
        self._dtype = max((own.dtype, target.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        self._differences = OpDifferences(self._dtype)
        self._probe: OpProbe | None = None
        kind = type(target).__name__.removeprefix("FSDP")
        if kind in ARCHITECTURES and own.spec.architecture == kind:
            self._probe = OpProbe(target, EngineOps(own), self._differences)
        self._kept: list[tuple[torch.Tensor, int, float]] = []  # logits, token, rollout's logprob

    def add(
        self,
        prompt: list[int],
        output: list[int],
        recorded: list[float],
        versions: list[int],
        *,
        with_ops: bool,
    ) -> None:
        """Compare one rollout."""
        tokens, probe, done = self._tokens, self._probe if with_ops else None, 0
        if probe is None:
            self._forward.run(prompt + output)
        else:
            with torch.no_grad(), probe.watching(self._first):
                self._forward.run(prompt + output)
        step, first = rows_per_block(self._own.spec.vocab_size), len(prompt) - 1

        def observe(logits_RV: torch.Tensor) -> None:
            nonlocal done
            for engine_RV in logits_RV.split(step):
                rows = torch.arange(first + done, first + done + len(engine_RV))
                part = slice(done, done + len(engine_RV))
                with torch.inference_mode(False), torch.no_grad():
                    trainer_RV = self._head(probe if done == 0 else None, rows)
                tokens.add_block(trainer_RV, engine_RV, output[part])
                self._keep(engine_RV, output[part], recorded[part], versions[part])
                done += len(engine_RV)

        logprobs, _ = self._engine.score_with_extras(prompt, output, self._params, observe)
        tokens.engine += logprobs
        tokens.recorded += recorded
        tokens.versions += versions
        tokens.positions += range(len(output))

    def _head(self, probe: OpProbe | None, rows: torch.Tensor) -> torch.Tensor:
        if probe is None:
            return self._forward.logits(rows)[1]
        with probe.watching(self._first):
            hidden_RE, logits_RV = self._forward.logits(rows)
        probe.compare_head(hidden_RE, logits_RV)
        return logits_RV

    def _keep(self, rows_RV: torch.Tensor, *of_tokens: Sequence[Any]) -> None:
        """Keep rows of the engine's present version, to fit the rollouts' temperature."""
        current = self._engine.weight_version
        for row_V, token, logprob, version in zip(rows_RV, *of_tokens, strict=True):
            if len(self._kept) < MAX_ROWS and version == current and logprob == logprob:
                self._kept.append((row_V.float().clone(), token, logprob))

    def result(self, num_rollouts: int, started: float) -> Mismatch:
        tokens, ops = self._tokens, self._differences.listed()
        apart_N = tokens.differences.abs()
        own = tokens.own_differences(self._engine.weight_version)
        largest = apart_N.max().item()
        return Mismatch(
            rollouts=num_rollouts,
            tokens=len(apart_N),
            max_difference=largest,
            mean_difference=apart_N.mean().item(),
            max_logit_difference=tokens.max_logit_difference,
            engine_difference=own.abs().max().item() if len(own) else 0.0,
            ratio=tokens.ratio(),
            divergence=tokens.divergence(),
            entropy=(_mean(tokens.entropies[0]), _mean(tokens.entropies[1])),
            flips=tokens.flips / len(apart_N),
            by_position=tokens.by_position(),
            by_version=tokens.by_version(),
            ratios=tokens.histogram(),
            ops=ops,
            suspects=self._suspects(ops, largest, own),
            seconds=time.perf_counter() - started,
            notes=[] if ops else [f"ops are compared of {', '.join(ARCHITECTURES)} alone"],
        )

    def _suspects(self, ops: Any, largest: float, own: torch.Tensor) -> list[Suspect]:
        target, probe = self._target, self._probe
        found = list(setting_suspects(self._model, target, self._own))
        tensors = differing_tensors(self._model, self._own.weight_loaders())
        found += tensors
        if probe is not None:
            found += position_suspects(probe.positions)
            if probe.dropout:
                text = f"attention drops {probe.dropout:g} of its weights"
                found.append(Suspect(Cause.DROPOUT, "attention_dropout", text))
        found += op_suspects(ops, tensors, target.config._attn_implementation)
        if self._kept:
            rows, ids, logprobs = zip(*self._kept, strict=True)
            device = rows[0].device
            sampling = sampling_suspect(
                own, torch.stack(rows), torch.tensor(ids, device=device),
                torch.tensor(logprobs, device=device), self._tokens.temperature or 1.0,
            )  # fmt: skip
            found += [] if sampling is None else [sampling]
        is_wide = torch.finfo(self._dtype).bits > 16
        if not found and largest > (_FLOAT32_NOISE if is_wide else 0.0):
            found.append(rounding_suspect(ops, self._dtype))
        return in_order(found)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _tokens(
    index: int, rollout: Rollout | Mapping[str, Any]
) -> tuple[list[int], list[int], list[float], list[int]]:
    """Prompt, output, logprobs (NaN: none) and weight versions."""

    def read(name: str) -> list[Any]:
        if isinstance(rollout, Mapping):
            return list(rollout.get(name) or ())
        return list(getattr(rollout, name))

    prompt, output = read("prompt_ids"), read("token_ids")
    if not prompt:
        remedy = "is missing: write it with output.prompt_ids=true"
        raise InvalidInputError(f"rollouts[{index}].prompt_ids", prompt, remedy)
    if not output:
        raise InvalidInputError(f"rollouts[{index}].token_ids", output, "must have a token")
    nothing = [float("nan")] * len(output)
    return prompt, output, read("logprobs") or nothing, read("weight_versions") or [0] * len(output)
