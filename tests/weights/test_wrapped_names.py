"""Names of parameters inside wrappers."""

from __future__ import annotations

import pytest

from rollout.errors import InvalidInputError
from rollout.weights.wrapped_names import checkpoint_name, refuse_wrapped


def test_wrappers_leave_no_trace_in_names():
    for wrapped, plain in (
        ("module.module._orig_mod.lm_head.weight", "lm_head.weight"),
        ("_fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module.mlp._checkpoint_wrapped_module"
         ".up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("module.base_model.model.model.norm.weight", "model.norm.weight"),
        ("base_model.model.lm_head.base_layer.weight", "lm_head.weight"),
        ("model.module.weight", "model.module.weight"),
    ):  # fmt: skip
        assert checkpoint_name(wrapped) == plain


def test_a_wrappers_name_is_refused_with_the_wrapper_and_a_remedy():
    known = {"model.layers.0.q.weight"}
    for name, message in (
        ("module.model.layers.0.q.weight", r"begin with `module\.`.* or strip it"),
        ("module._orig_mod.model.layers.0.q.weight", r"begin with `module\._orig_mod\.`"),
        ("_fsdp_wrapped_module.model.layers.0.q.weight", r"begin with `_fsdp_wrapped_module\.`"),
        ("base_model.model.model.layers.0.q.weight", r"begin with `base_model\.model\.`"),
        ("model.layers.0._fsdp_wrapped_module.q.weight", r"hold `_fsdp_wrapped_module\.`"),
        ("model.layers.0._checkpoint_wrapped_module.q.weight",
         r"hold `_checkpoint_wrapped_module\.`.* or strip it"),
        ("base_model.model.model.layers.0.q.base_layer.weight",
         r"`base_layer\.`.*merges adapters$"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=message):
            refuse_wrapped(["model.layers.0.q.weight", "module.other", name], known)
    refuse_wrapped(["model.layers.0.q.weight", "module.other"], known)
