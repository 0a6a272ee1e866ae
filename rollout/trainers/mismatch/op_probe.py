"""Runs the engine's ops beside the trainer's, on the trainer's inputs, while its forward goes.

Legend: B = 1 sequence, T rows, E hidden, H query heads, K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from rollout.trainers.mismatch.differences import OpDifferences, relative_difference
from rollout.trainers.mismatch.engine_ops import EngineOps

_MAX_ROWS = 1024  # of a sequence: so many are enough to see an op
Hook = Callable[[Any, Any, Any, Any], None]
"""Gets module, arguments, keyword arguments and output."""


class OpProbe:
    """Compares every op of one forward of a transformers model with the engine's.

    Rotation and attention have no module: for the time of `watching` the attention modules have a
    config of their own, which names a function of this probe. Other models and threads never see
    it. Under `exact_forward`, which calls no such function, both are compared as one.
    """

    def __init__(self, target: Any, ops: EngineOps, differences: OpDifferences) -> None:
        """``target``: of an architecture that exact training knows."""
        self._target, self._ops, self._differences = target, ops, differences
        self._is_gemma = hasattr(target.base_model.layers[0], "pre_feedforward_layernorm")
        self.dropout = 0.0  # of attention, as it was run
        self.attention_squares = [0.0, 0.0]  # mean differences, as it was run and by torch's own
        self.positions_T: torch.Tensor | None = None  # int64 [T], of the last forward
        self._first = 0
        self._of_layer: dict[str, torch.Tensor] = {}
        self._head_BTV: torch.Tensor | None = None

    @contextmanager
    def watching(self, first: int) -> Iterator[None]:
        """Compare the ops of forwards inside. ``first``: the row of the first token."""
        self._first = first
        self._of_layer.clear()  # an earlier forward may have failed within a layer
        with ExitStack() as exits:
            for module, hook in self._hooks():
                handle = module.register_forward_hook(hook, with_kwargs=True)
                exits.callback(handle.remove)
            exits.enter_context(self._attention_watched())
            yield

    def compare_head(self, hidden_TE: torch.Tensor, logits_TV: torch.Tensor) -> None:
        """Compare head and logits of rows whose forward has just been run inside `watching`."""
        ops, add = self._ops, partial(self._differences.add, summed=hidden_TE.shape[1])
        if self._head_BTV is not None and self._head_BTV.shape[1] == len(hidden_TE):
            add(
                "lm_head", None, self._head_BTV[0], ops.rows(ops.model.vocabulary.logits, hidden_TE)
            )
        add("logits", None, logits_TV, ops.rows(ops.model.logits, hidden_TE))

    def _hooks(self) -> Iterator[tuple[nn.Module, Hook]]:
        base, ops = self._target.base_model, self._ops
        yield base.embed_tokens, self._embedding
        yield base.norm, self._rowwise("norm", None, partial(ops.norm, "model.norm.weight"))
        yield base.rotary_emb, self._note_positions
        yield self._target.lm_head, self._note_head
        for index, layer in enumerate(base.layers):
            attention = layer.self_attn
            for at, module in (("", layer), ("self_attn.", attention)):
                for name, child in module.named_children():
                    if name.endswith("norm"):
                        yield child, partial(self._norm, index, f"{at}{name}")
            for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
                op = lambda x_TE, index=index, part=part: ops.qkv(index, x_TE)[part]  # noqa: E731
                yield getattr(attention, name), self._rowwise(f"self_attn.{name}", index, op)
            yield attention.o_proj, partial(self._exact_attention, index)
            output = partial(ops.rows, ops.model.layers[index].linears()[1])
            yield attention.o_proj, self._rowwise("self_attn.o_proj", index, output)
            if hasattr(layer.mlp, "gate"):
                yield layer.mlp.gate, partial(self._router, index)
            yield layer.mlp, partial(self._mlp, index)
            yield layer, partial(self._residual, index)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens' rows of [1, T, ...] or [T, ...]."""
        rows = x[0] if x.dim() > 2 and len(x) == 1 else x
        return rows[self._first : self._first + _MAX_ROWS].detach().to(self._ops.model.device)

    def _embedding(self, module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        ids_T = self._rows(args[0][0])
        self._differences.add(
            "embed_tokens", None, self._rows(output), self._ops.model.embed(ids_T)
        )

    def _rowwise(
        self, name: str, index: int | None, op: Callable[[torch.Tensor], torch.Tensor]
    ) -> Hook:
        """A hook of a module that reads each row alone."""

        def hook(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            given, found = self._rows(args[0]), self._rows(output)
            self._of_layer[name] = found
            self._differences.add(name, index, found, op(given), summed=given.shape[-1])

        return hook

    def _norm(
        self, index: int, name: str, module: Any, args: Any, kwargs: Any, output: torch.Tensor
    ) -> None:
        ops, has_offset = self._ops, self._ops.spec.norm_unit_offset
        heads_first = self._is_gemma and args[0].dim() == 4
        given, found = (
            self._rows(each.transpose(1, 2) if heads_first else each) for each in (args[0], output)
        )
        self._of_layer[f"{name} input"], self._of_layer[name] = given, found
        width, weight = given.shape[-1], f"model.layers.{index}.{name}.weight"
        given, found = given.reshape(-1, width), found.reshape(-1, width)
        other = "a product with its weight" if has_offset else "a product with 1 + its weight"
        self._differences.add(
            name, index, found, ops.norm(weight, given), summed=width,
            unscaled_TF=found.float() / (module.weight + has_offset).float(),
            alternatives={other: lambda: ops.norm(weight, given, not has_offset)},
        )  # fmt: skip

    def _heads(self, index: int) -> list[torch.Tensor]:
        """Queries, keys and values before the rotation, [T, heads, D]."""
        spec, found = self._ops.spec, self._of_layer
        return [
            found.get(f"self_attn.{name}_norm", found[f"self_attn.{name}_proj"])
            .reshape(-1, heads, spec.head_dim)
            for name, heads in zip("qkv", (spec.num_heads, *[spec.num_kv_heads] * 2), strict=True)
        ]  # fmt: skip

    def _exact_attention(self, index: int, module: Any, args: Any, *_: Any) -> None:
        """Compare rotation and attention as one, if no function of attention was called."""
        if "attended" not in self._of_layer:
            q, k, v = self._heads(index)
            expected = self._ops.attention(index, *self._ops.rotary(index, q, k), v)
            self._add_attention(index, self._rows(args[0]), expected)

    def _add_attention(
        self, index: int, trainer: torch.Tensor, engine: torch.Tensor, **options: Any
    ) -> None:
        self._differences.add(
            "self_attn.attention", index, trainer, engine, summed=len(engine), stages=2, **options
        )

    def _router(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Compare logits; a choice whose logits the engine has apart; weights of equal choices.

        Rows with other experts or weights are left out where the experts are compared.
        """
        logits_TN, experts_TX, weights_TX = self._ops.router(index, self._rows(args[0]))
        given_TN, given_weights_TX, given_TX = (self._rows(each) for each in output)
        dense, given = torch.zeros_like(logits_TN), torch.zeros_like(logits_TN)
        dense.scatter_(1, experts_TX.long(), weights_TX.to(dense.dtype))
        given.scatter_(1, given_TX, given_weights_TX.to(given.dtype))
        flipped_T = ((dense > 0) != (given > 0)).any(1)
        least_T = logits_TN.masked_fill(dense == 0, torch.inf).amin(1)
        taken_T = logits_TN.masked_fill(given == 0, torch.inf).amin(1)
        gap_T = (least_T - taken_T).where(flipped_T, 0) / logits_TN.abs().amax(1)
        apart_T = (given - dense).abs().amax(1)
        self._of_layer["rerouted"] = flipped_T | (apart_T > self._differences.rounding(2))
        add = partial(self._differences.add, "mlp.gate", index, summed=args[0].shape[-1], stages=2)
        add(given_TN, logits_TN)
        add((1 + gap_T)[:, None], torch.ones_like(gap_T)[:, None])
        add(given[~flipped_T], dense[~flipped_T])

    def _mlp(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, found = self._rows(args[0]), self._rows(output)
        expected = self._ops.rows(self._ops.model.layers[index].mlp, given)
        self._of_layer["mlp"] = found
        rows_T = ~self._of_layer.get("rerouted", torch.zeros_like(given[:, 0]).bool())
        self._differences.add(
            "mlp", index, found[rows_T], expected[rows_T],
            summed=self._ops.spec.ffn_size, stages=3,
        )  # fmt: skip

    def _residual(self, index: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Compare the layer's two additions, then forget the layer."""
        after = "pre_feedforward_layernorm" if self._is_gemma else "post_attention_layernorm"
        mixed = "post_attention_layernorm" if self._is_gemma else "self_attn.o_proj"
        fed = "post_feedforward_layernorm" if self._is_gemma else "mlp"
        given, middle = self._rows(args[0]), self._of_layer[f"{after} input"]
        output = self._rows(output[0] if isinstance(output, tuple) else output)
        for trainer, parts in (
            (middle, (given, self._of_layer[mixed])),
            (output, (middle, self._of_layer[fed])),
        ):
            engine = torch.add(*(each.to(self._ops.model.dtype) for each in parts))
            self._differences.add("residual", index, trainer, engine)
        self._of_layer.clear()

    def _note_head(self, module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        self._head_BTV = output.detach()

    def _note_positions(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if given is not None:
            self.positions_T = given[0, self._first :].detach()

    @contextmanager
    def _attention_watched(self) -> Iterator[None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        modules = [layer.self_attn for layer in self._target.base_model.layers]
        modeling: Any = sys.modules[type(modules[0]).__module__]
        own = modules[0].config
        implementation, name = own._attn_implementation, f"specrollout_probe_{id(self)}"
        attend = ALL_ATTENTION_FUNCTIONS.get(implementation, modeling.eager_attention_forward)
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def recorded(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
            found = attend(module, q, k, v, mask, **kwargs)
            self.dropout = max(self.dropout, kwargs.get("dropout") or 0.0)
            is_plain = implementation == "sdpa" or (mask is not None and mask.dim() != 4)
            other = found if is_plain else plain(module, q, k, v, mask, **kwargs)
            inputs = [self._rows(each.transpose(1, 2)) for each in (q, k, v)]
            outputs = self._rows(found[0]), self._rows(other[0])
            self._attended(module.layer_idx, kwargs.get("sliding_window"), inputs, outputs)
            return found

        watched = copy.copy(own)
        watched._attn_implementation_internal = name
        ALL_ATTENTION_FUNCTIONS[name] = recorded
        try:
            for module in modules:
                module.config = watched
            yield
        finally:
            for module in modules:
                module.config = own
            del ALL_ATTENTION_FUNCTIONS[name]

    def _attended(
        self,
        index: int,
        given: int | None,
        inputs: list[torch.Tensor],
        outputs: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Compare the rotation before an attention, and the attention. ``given``: its window;
        ``outputs``: its own, and that of torch's attention."""
        (q, k, v), ops = inputs, self._ops
        for found, expected in zip((q, k), ops.rotary(index, *self._heads(index)[:2]), strict=True):
            self._differences.add("self_attn.rotary", index, found, expected, stages=4)
        window = ops.spec.window_of(index)
        near = {size + by for size in (window, given) if size for by in (-1, 0, 1)}
        alternatives = {
            f"a window of {size}": partial(ops.attention, index, q, k, v, size)
            for size in sorted(near - {0, window})
        }
        if window is not None:
            alternatives["no window"] = partial(ops.attention, index, q, k, v, None)
        expected = ops.attention(index, q, k, v)
        self._of_layer["attended"] = outputs[0]
        self._add_attention(index, outputs[0], expected, alternatives=alternatives)
        for side, output in enumerate(outputs):
            self.attention_squares[side] += relative_difference(output, expected)[1] ** 2
