"""Names of parameters inside wrappers: data parallel, compiled, checkpointed, PEFT's."""

from __future__ import annotations

from collections.abc import Container, Iterable

from rollout.errors import InvalidInputError

WRAPPING = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Modules that wrappers put between a module and its own children, at any depth."""

_ADAPTED = "base_layer"
_SOURCE = "send rollout.trainers.weight_source(model)"


def checkpoint_name(name: str) -> str:
    """``name`` of a parameter or module without what data-parallel, compile and PEFT wrappers add.

    ``module.base_model.model.lm_head.base_layer.weight`` is ``lm_head.weight``.
    """
    parts = [part for part in name.split(".") if part not in WRAPPING]
    while parts[:1] == ["module"]:
        parts = parts[1:]
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    return ".".join(part for part in parts if part != _ADAPTED)


def refuse_wrapped(names: Iterable[str], known: Container[str]) -> None:
    """Raise InvalidInputError for a name that only a wrapper keeps from being a known one.

    It is not stripped silently: weights inside a wrapper may be shards, or lack their adapter.
    """
    for name in names:
        if name in known or (plain := checkpoint_name(name)) not in known:
            continue
        if _ADAPTED in name.split("."):
            why = f"names hold `{_ADAPTED}.`, PEFT's for a weight without its adapter: {_SOURCE}, "
            raise InvalidInputError("named_tensors", name, f"{why}which merges adapters")
        if name.endswith(plain):
            found = f"begin with `{name.removesuffix(plain)}`, a wrapper's prefix"
        else:
            inner = next(part for part in name.split(".") if part in WRAPPING)
            found = f"hold `{inner}.`, a wrapper's"
        raise InvalidInputError("named_tensors", name, f"names {found}: {_SOURCE}, or strip it")
