"""From the names a wrapped model gives its parameters to those of the checkpoint."""

from __future__ import annotations

from torch import nn

# Modules that wrappers put between a module and its own children, at any depth.
_WRAPPING = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


def checkpoint_name(name: str) -> str:
    """``name`` of a parameter or module without what data-parallel, compile and PEFT wrappers add.

    ``module.base_model.model.lm_head.base_layer.weight`` is ``lm_head.weight``.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPING]
    while parts[:1] == ["module"]:
        parts = parts[1:]
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    return ".".join(part for part in parts if part != "base_layer")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a chain of FSDP1, compile and checkpoint wrappers, or the module itself."""
    while True:
        inner = next((child for name, child in module.named_children() if name in _WRAPPING), None)
        if inner is None:
            return module
        module = inner
