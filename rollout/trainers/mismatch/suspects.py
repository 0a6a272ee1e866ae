"""Likely causes of a mismatch: settings that differ, and ops that rounding does not explain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rollout.models.causal_lm import CausalLM
from rollout.trainers.mismatch.result import Cause, OpDifference, Suspect

_ROUNDS_MORE = 1.5  # squared: of what rounding alone adds to attention


def setting_suspects(
    model: nn.Module, target: Any, engine: CausalLM, autocast: torch.dtype | None
) -> Iterator[Suspect]:
    """Settings of the trainer's modules that are not the engine's."""
    spec = engine.spec
    for name, module in model.named_modules():
        if module.training and isinstance(module, nn.Dropout) and module.p > 0:
            yield Suspect(Cause.DROPOUT, name, f"{name} drops {module.p:g} of its inputs")
    dtypes = {
        name: parameter.dtype
        for name, parameter in target.named_parameters()
        if "lora_" not in name  # of any dtype: they are merged
    }
    if autocast is not None:
        dtypes = {"autocast": autocast}
    others = {name: dtype for name, dtype in dtypes.items() if dtype is not engine.dtype}
    if autocast is None and len(others) == len(dtypes):
        others = {"model": target.dtype}
    for name, dtype in others.items():
        text = f"{name} is in {dtype_name(dtype)}, the engine's in {dtype_name(engine.dtype)}"
        yield Suspect(_cause_of_module(name.rpartition(".")[0]), name, text)
    for name, module in target.named_modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if name.endswith("norm") and isinstance(eps, float) and eps != spec.rms_norm_eps:
            text = f"{name} has the epsilon {eps:g}, the engine {spec.rms_norm_eps:g}"
            yield Suspect(Cause.NORM, name, text)
    cap = getattr(target.config, "final_logit_softcapping", None)
    if cap != spec.logit_soft_cap:
        text = f"the trainer caps logits at {cap}, the engine at {spec.logit_soft_cap}"
        yield Suspect(Cause.LOGITS, "final_logit_softcapping", text)


def position_suspects(positions_T: torch.Tensor | None) -> Iterator[Suspect]:
    """A suspect where a sequence's tokens have other positions than 0, 1, ..."""
    for index, position in enumerate([] if positions_T is None else positions_T.tolist()):
        if position != index:
            text = (
                f"token {index} of a sequence has the position {position}: padding is counted, or "
                "positions go on from another sequence"
            )
            yield Suspect(Cause.POSITIONS, "position_ids", text)
            return


def op_suspects(
    ops: Sequence[OpDifference], tensors: Sequence[Suspect], implementation: str | None
) -> Iterator[Suspect]:
    """A suspect for each kind of op whose difference rounding does not explain, its worst layer.

    ``tensors``: suspects by tensor; ops with such a weight are left out.
    """
    seen: set[str] = set()
    for op in ops:
        has_other_weight = any(f".{op.where}." in f".{tensor.where}" for tensor in tensors)
        may_be_tied = bool(tensors) and op.name in ("logits", "lm_head", "embed_tokens")
        if not (op.is_explained or op.name in seen or has_other_weight or may_be_tied):
            seen.add(op.name)
            yield _of_op(op, implementation)


def _of_op(op: OpDifference, implementation: str | None) -> Suspect:
    text = f"{op.where} differs by {op.difference:.2g}, rounding explains {op.rounding:.1g}"
    if op.alternative:
        text += f": it is the engine's with {op.alternative}"
    if op.precision:
        text += f": its output has the digits of {op.precision}"
    match op.name.rpartition(".")[2]:
        case "attention" if op.precision:
            cause, text = Cause.ATTENTION_IMPLEMENTATION, f"{text}, by {implementation}"
        case "attention":
            cause = Cause.MASK
        case "rotary":
            cause = Cause.ROPE
        case name if name.endswith("norm") and not op.precision:
            cause = Cause.NORM
        case _:
            cause = _cause_of_module(op.name)
    return Suspect(cause, op.where, text)


def _cause_of_module(name: str) -> Cause:
    """What a module in another dtype is the cause of."""
    known = {"gate": Cause.ROUTER, "lm_head": Cause.LOGITS, "logits": Cause.LOGITS}
    return known.get(name.rpartition(".")[2], Cause.DTYPE)


def attention_suspects(squares: Sequence[float], implementation: str | None) -> Iterator[Suspect]:
    """A suspect where the trainer's attention rounds more than torch's own on the same inputs.

    ``squares``: of the mean differences of either from the engine's.
    """
    own, plain = squares
    if own > _ROUNDS_MORE * plain:
        text = f"{implementation} is {(own / plain) ** 0.5:.1f} times as far away as torch's sdpa"
        yield Suspect(Cause.ATTENTION_IMPLEMENTATION, "self_attn.attention", text)


def rounding_suspect(ops: Sequence[OpDifference], dtype: torch.dtype) -> Suspect:
    """The suspect where nothing but rounding differs, with the share of each kind of op."""
    if not ops:
        text = "no setting and no tensor differs; ops were not compared"
        return Suspect(Cause.ROUNDING, dtype_name(dtype), text)
    shares: dict[str, float] = {}
    for op in ops:
        shares[op.name] = shares.get(op.name, 0.0) + op.share
    largest_first = sorted(shares.items(), key=lambda each: -each[1])
    listed = ", ".join(f"{name} {share:.0%}" for name, share in largest_first if share >= 0.005)
    return Suspect(Cause.ROUNDING, dtype_name(dtype), f"that of {dtype_name(dtype)}: {listed}")


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``, without torch's prefix."""
    return str(dtype).removeprefix("torch.")
