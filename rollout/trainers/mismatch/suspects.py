"""Likely causes of a mismatch: settings that differ, and ops that rounding does not explain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rollout.models.causal_lm import CausalLM
from rollout.trainers.mismatch.result import Cause, OpDifference, Suspect

_ORDER = {cause: index for index, cause in enumerate(Cause)}
_NORM_EPS = ("variance_epsilon", "eps")


def setting_suspects(model: nn.Module, target: Any, engine: CausalLM) -> Iterator[Suspect]:
    """Settings of the trainer's modules that are not the engine's."""
    spec = engine.spec
    for name, module in model.named_modules():
        if module.training and isinstance(module, nn.Dropout) and module.p > 0:
            yield Suspect(Cause.DROPOUT, name, f"{name} drops {module.p:g} of its inputs")
    dtypes = {str(each.dtype).removeprefix("torch.") for each in target.parameters()}
    own = str(engine.dtype).removeprefix("torch.")
    device = engine.device.type
    if torch.is_autocast_enabled(device):
        dtypes = {str(torch.get_autocast_dtype(device)).removeprefix("torch.")}
    if dtypes != {own}:
        text = f"the trainer computes in {', '.join(sorted(dtypes))}, the engine in {own}"
        yield Suspect(Cause.DTYPE, "model", text)
    for name, module in target.named_modules():
        if "norm" in name.rpartition(".")[2]:
            eps = next((getattr(module, each) for each in _NORM_EPS if hasattr(module, each)), None)
            if isinstance(eps, float) and eps != spec.rms_norm_eps:
                text = f"{name} has the epsilon {eps:g}, the engine {spec.rms_norm_eps:g}"
                yield Suspect(Cause.NORM, name, text)
                break  # one says it of all
    cap = getattr(target.config, "final_logit_softcapping", None)
    if cap != spec.logit_soft_cap:
        text = f"the trainer caps logits at {cap}, the engine at {spec.logit_soft_cap}"
        yield Suspect(Cause.LOGITS, "final_logit_softcapping", text)


def position_suspects(positions: torch.Tensor | None) -> Iterator[Suspect]:
    """A suspect where a sequence's tokens have other positions than 0, 1, ..."""
    if positions is None:
        return
    expected = torch.arange(len(positions), device=positions.device)
    if torch.equal(positions.long(), expected):
        return
    first = int((positions.long() != expected).nonzero()[0])
    text = (
        f"token {first} of a sequence has the position {int(positions[first])}, not {first}: "
        "padding is counted, or positions go on from another sequence"
    )
    yield Suspect(Cause.POSITIONS, "position_ids", text)


def op_suspects(
    ops: Sequence[OpDifference], tensors: Sequence[Suspect], implementation: str | None
) -> Iterator[Suspect]:
    """A suspect for each kind of op whose difference rounding does not explain, its worst layer.

    ``tensors``: suspects by tensor; an op with such a weight is left out.
    """
    seen: set[str] = set()
    for op in ops:
        if op.is_explained or op.name in seen:
            continue
        if any(f".{op.where}." in f".{tensor.where}" for tensor in tensors):
            continue
        if tensors and op.name in ("logits", "lm_head", "embed_tokens"):
            continue  # a tied weight has another name
        seen.add(op.name)
        yield _of_op(op, implementation)


def _of_op(op: OpDifference, implementation: str | None) -> Suspect:
    size = f"{op.where} differs by {op.difference:.2g}, rounding explains {op.rounding:.1g}"
    lower = f": its output has the digits of {op.precision}" if op.precision else ""
    other = f": it is the engine's with {op.alternative}" if op.alternative else ""
    match op.name.rpartition(".")[2]:
        case "attention" if op.precision:
            text = f"{size}{lower}; the implementation {implementation} rounds"
            return Suspect(Cause.ATTENTION_IMPLEMENTATION, op.where, text)
        case "attention":
            text = f"{size}{other or ': a mask, a window or the scale of scores'}"
            return Suspect(Cause.MASK, op.where, text)
        case "rotary":
            return Suspect(Cause.ROPE, op.where, f"{size}: another base, scaling or layout")
        case "gate":
            return Suspect(Cause.ROUTER, op.where, f"{size}{lower}: choice or weights of experts")
        case "lm_head" | "logits":
            return Suspect(Cause.LOGITS, op.where, f"{size}{lower or ': a cap, a scale or a cast'}")
        case name if name.endswith("norm") and not op.precision:
            return Suspect(Cause.NORM, op.where, f"{size}{other}")
    return Suspect(Cause.DTYPE, op.where, f"{size}{lower}: its weights are the engine's")


def rounding_suspect(ops: Sequence[OpDifference], dtype: torch.dtype) -> Suspect:
    """The suspect where nothing but rounding differs, with the share of each kind of op."""
    shares: dict[str, float] = {}
    for op in ops:
        shares[op.name] = shares.get(op.name, 0.0) + op.share
    most = sorted(shares.items(), key=lambda each: -each[1])
    listed = ", ".join(f"{name} {share:.0%}" for name, share in most if share >= 0.005)
    name = str(dtype).removeprefix("torch.")
    return Suspect(Cause.ROUNDING, name, f"rounding of {name}: {listed or 'no op was compared'}")


def in_order(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Suspects by cause, the likeliest first; those of one cause in their order."""
    return sorted(suspects, key=lambda suspect: _ORDER[suspect.cause])
