"""`compare`: a trainer's model and an engine on the same rollouts."""

from __future__ import annotations

import math
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
from rollout.trainers.mismatch.sampling import sampling_suspects
from rollout.trainers.mismatch.suspects import (
    attention_suspects,
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
_OP_ROLLOUTS = 2  # have their ops compared
_Columns = tuple[list[int], list[int], list[float], list[int]]
"""Prompt, output, logprobs (NaN: none) and weight versions of a rollout."""


def compare(
    model: nn.Module,
    engine: RolloutEngine,
    rollouts: Sequence[Rollout | Mapping[str, Any]],
    *,
    temperature: float = 1.0,
    left_padding: int = 0,
) -> Mismatch:
    """Compare a trainer's logprobs with an engine's, op by op, and name what parts them.

    The model runs as it is, in its mode, one rollout at a time, without gradients. Nothing of model
    or engine is changed, nor torch's random state; the engine's prefix cache takes in what is
    scored. Ops are compared of two rollouts, 1,024 tokens each at most.

    Args:
        model: a transformers causal language model, or what wraps one. Ops are compared of the
            architectures that exact training knows.
        engine: on one rank, in this process.
        rollouts: of an engine, or rows of a job's file that have ``prompt_ids``.
        temperature: that the trainer divides logits by; 0 is 1.
        left_padding: rows of padding before each sequence, with a mask, as trainers pad.

    Raises InvalidInputError for an engine of several ranks, an empty list, a rollout without prompt
    or tokens or with values that are none, and a model that is none; EngineStateError for an engine
    that sleeps.
    """
    started = time.perf_counter()
    if not isinstance(engine, RolloutEngine) or engine.worker.ranks.all.size > 1:
        kind = type(engine).__name__
        raise InvalidInputError("engine", kind, "must be a RolloutEngine on one rank")
    if left_padding < 0:
        raise InvalidInputError("left_padding", left_padding, "must be >= 0")
    engine.score_with_extras([0], [0], SamplingParams(temperature=temperature))  # it is awake
    compared = _Comparison(model, engine, temperature, left_padding)
    checked = [compared.columns(f"rollouts[{at}]", rollout) for at, rollout in enumerate(rollouts)]
    if not checked:
        raise InvalidInputError("rollouts", [], "must have at least one rollout")
    device = compared.target.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for at, columns in enumerate(checked):
            compared.add(columns, with_ops=at < _OP_ROLLOUTS)
    return compared.result(len(checked), started)


class _Comparison:
    def __init__(
        self, model: nn.Module, engine: RolloutEngine, temperature: float, left_padding: int
    ) -> None:
        self._model, self._engine, self._first = model, engine, left_padding
        self.target = target = transformers_model(model)
        kind = type(target).__name__.removeprefix("FSDP")  # FSDP2 derives its own
        if not hasattr(target, "base_model") or target.get_output_embeddings() is None:
            raise InvalidInputError("model", kind, "must be a transformers causal language model")
        self._own = own = cast(CausalLM, engine.worker.weights.parts["target"])
        self._forward = TrainerForward(model, target, left_padding)
        self._params = SamplingParams(temperature=temperature)
        self._tokens = TokenDifferences(temperature, engine.weight_version)
        self._tensors = list(differing_tensors(model, own.weight_loaders()))
        self._dtype = max((own.dtype, target.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        self._differences = OpDifferences(self._dtype)
        self._probe: OpProbe | None = None
        self._notes = []
        if kind not in ARCHITECTURES or own.spec.architecture != kind:
            known = ", ".join(ARCHITECTURES)
            self._notes = [f"ops of {kind} are not compared: only those of {known}"]
        elif any(each.cause is Cause.MISSING_TENSOR for each in self._tensors):
            self._notes = ["ops are not compared: the engine has other tensors"]
        else:
            self._probe = OpProbe(target, EngineOps(own), self._differences)

    def columns(self, where: str, rollout: Rollout | Mapping[str, Any]) -> _Columns:
        """The rollout's columns. Raises InvalidInputError for values that are none."""
        values = [
            rollout.get(name) if isinstance(rollout, Mapping) else getattr(rollout, name, None)
            for name in ("prompt_ids", "token_ids", "logprobs", "weight_versions")
        ]
        prompt, output, logprobs, versions = (list(each or ()) for each in values)
        if not prompt:
            remedy = "is missing: write it with output.prompt_ids=true"
            raise InvalidInputError(f"{where}.prompt_ids", prompt, remedy)
        if not output:
            raise InvalidInputError(f"{where}.token_ids", output, "must have a token")
        config = self.target.config.get_text_config()
        vocab_size = min(self._own.spec.vocab_size, config.vocab_size)
        for token in prompt + output:
            if not (isinstance(token, int) and 0 <= token < vocab_size):
                raise InvalidInputError(
                    where, token, f"tokens must be integers in [0, {vocab_size})"
                )
        size, max_size = len(prompt) + len(output), self._engine.worker.max_context_len
        if size > max_size:
            raise InvalidInputError(where, size, f"tokens must fit the context of {max_size}")
        for name, of_tokens in (("logprobs", logprobs), ("weight_versions", versions)):
            if len(of_tokens) not in (0, len(output)):
                remedy = f"values must be as many as the {len(output)} tokens"
                raise InvalidInputError(f"{where}.{name}", len(of_tokens), remedy)
        recorded = [math.nan if each is None else each for each in logprobs]
        return prompt, output, recorded or [math.nan] * len(output), versions or [0] * len(output)

    def add(self, columns: _Columns, *, with_ops: bool) -> None:
        """Compare one rollout."""
        prompt, output, recorded, versions = columns
        probe, done = self._probe if with_ops else None, 0
        with nullcontext() if probe is None else probe.watching(self._first):
            self._forward.run(prompt + output)
        step, first = rows_per_block(self._own.spec.vocab_size), len(prompt) - 1

        def observe(logits_RV: torch.Tensor) -> None:
            nonlocal done
            if not len(logits_RV):
                return  # a chunk of the prompt
            for engine_RV in logits_RV.split(step):
                part = slice(done, done + len(engine_RV))
                rows_R = torch.arange(first + part.start, first + part.stop)
                with torch.inference_mode(False), torch.no_grad():
                    trainer_RV = self._logits(rows_R, probe if done == 0 else None)
                given = output[part], recorded[part], versions[part]
                self._tokens.add_block(trainer_RV, engine_RV, *given)
                done = part.stop

        score = self._engine.score_with_logits
        self._tokens.engine += score(prompt, output, observe, self._params)
        self._tokens.positions += range(len(output))

    def _logits(self, rows_R: torch.Tensor, probe: OpProbe | None) -> torch.Tensor:
        if probe is None:
            return self._forward.logits(rows_R)[1]
        with probe.watching(self._first):
            hidden_RE, logits_RV = self._forward.logits(rows_R)
        probe.compare_head(hidden_RE, logits_RV)
        return logits_RV

    def result(self, num_rollouts: int, started: float) -> Mismatch:
        ops, figures = self._differences.listed(), self._tokens.figures()
        causes = list(Cause)
        suspects = self._suspects(ops, figures["max_difference"])
        return Mismatch(
            **figures,
            rollouts=num_rollouts,
            ops=ops,
            suspects=sorted(suspects, key=lambda suspect: causes.index(suspect.cause)),
            seconds=time.perf_counter() - started,
            notes=self._notes,
        )

    def _suspects(self, ops: Sequence[OpDifference], largest: float) -> Iterator[Suspect]:
        probe, implementation = self._probe, self.target.config._attn_implementation
        found = [
            *setting_suspects(self._model, self.target, self._own, self._forward.autocast),
            *self._tensors,
            *op_suspects(ops, self._tensors, implementation),
            *sampling_suspects(self._tokens),
        ]
        if probe is not None:
            found += position_suspects(probe.positions_T)
            if probe.dropout:
                text = f"attention drops {probe.dropout:g} of its weights"
                found.append(Suspect(Cause.DROPOUT, "attention_dropout", text))
        if math.isnan(largest):
            found.append(Suspect(Cause.LOGITS, "logprobs", "a logprob is no number"))
        yield from found
        is_wide = torch.finfo(self._dtype).bits > 16
        if not found and largest > (_FLOAT32_NOISE if is_wide else 0.0):
            yield rounding_suspect(ops, self._dtype)
            if probe is not None and not is_wide:
                yield from attention_suspects(probe.attention_squares, implementation)
