"""Runs the engine's ops beside the trainer's, on the trainer's inputs, while its forward goes.

Legend: B = 1 sequence, T rows, E hidden, H query heads, K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

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
_ROTARY = "apply_rotary_pos_emb"


class OpProbe:
    """Compares every op of one forward of a transformers model with the engine's.

    Rotation and attention have no module: transformers' functions are wrapped for the time of
    `watching`. Under `exact_forward`, which calls neither, both are compared as one.
    """

    def __init__(self, target: Any, ops: EngineOps, differences: OpDifferences) -> None:
        """``target``: of an architecture that exact training knows."""
        self._target, self._ops, self._differences = target, ops, differences
        self.dropout = 0.0  # of attention, as it was run
        self.attention_squares = [0.0, 0.0]  # mean differences, as it was run and by torch's own
        self.positions_T: torch.Tensor | None = None  # int64 [T], of the last forward
        self._first = 0
        self._of_layer: dict[str, torch.Tensor] = {}
        self._rotated: tuple[torch.Tensor, ...] | None = None
        self._head_BTV: torch.Tensor | None = None

    @contextmanager
    def watching(self, first: int) -> Iterator[None]:
        """Compare the ops of forwards inside. ``first``: the row of the first token."""
        self._first = first
        with ExitStack() as exits:
            for module, hook in self._hooks():
                handle = module.register_forward_hook(hook, with_kwargs=True)
                exits.callback(handle.remove)
            exits.enter_context(self._rotary_wrapped())
            exits.enter_context(self._attention_wrapped())
            yield

    def compare_head(self, hidden_TE: torch.Tensor, logits_TV: torch.Tensor) -> None:
        """Compare head and logits of rows whose forward has just been run inside `watching`."""
        add = partial(self._differences.add, summed=hidden_TE.shape[1])
        if self._head_BTV is not None and self._head_BTV.shape[1] == len(hidden_TE):
            add("lm_head", None, self._head_BTV[0], self._ops.head(hidden_TE))
        add("logits", None, logits_TV, self._ops.logits(hidden_TE))

    def _hooks(self) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
        base, ops = self._target.base_model, self._ops
        embed = lambda ids_T: ops.model.embed(ids_T.to(ops.model.device))  # noqa: E731
        yield base.embed_tokens, self._rowwise("embed_tokens", None, embed)
        yield base.norm, self._rowwise("norm", None, partial(ops.norm, "model.norm.weight"))
        if isinstance(getattr(base, "rotary_emb", None), nn.Module):
            yield base.rotary_emb, self._note_positions
        yield self._target.lm_head, self._note_head
        for index, layer in enumerate(base.layers):
            yield from self._layer_hooks(index, layer)

    def _layer_hooks(self, index: int, layer: Any) -> Iterator[tuple[nn.Module, Callable]]:
        ops, attention = self._ops, layer.self_attn
        for at, module in (("", layer), ("self_attn.", attention)):
            for name, child in module.named_children():
                if name.endswith("norm"):
                    yield child, self._norm_hook(f"{at}{name}", index)
        for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
            op = lambda x_TE, part=part: ops.qkv(index, x_TE)[part]  # noqa: E731
            yield getattr(attention, name), self._rowwise(f"self_attn.{name}", index, op)
        yield attention.o_proj, self._output_hook(index)
        if hasattr(layer.mlp, "gate"):
            yield layer.mlp.gate, partial(self._router, index)
        yield layer.mlp, partial(self._mlp, index)
        yield layer, partial(self._residual, index, hasattr(layer, "pre_feedforward_layernorm"))

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens' rows of [1, T, ...] or [T, ...]."""
        rows = x[0] if x.dim() > 2 and len(x) == 1 else x
        return rows[self._first : self._first + _MAX_ROWS].detach().to(self._ops.model.device)

    def _rowwise(
        self, name: str, index: int | None, op: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[..., None]:
        """A hook of a module that reads each row alone."""

        def hook(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            given = args[0] if args else next(iter(kwargs.values()))
            rows = self._rows(given[0] if given.dim() == 2 and not given.is_floating_point()
                              else given)  # fmt: skip
            self._of_layer[name] = self._rows(output)
            summed = given.shape[-1] if given.is_floating_point() else 1
            self._differences.add(name, index, self._of_layer[name], op(rows), summed=summed)

        return hook

    def _norm_hook(self, name: str, index: int) -> Callable[..., None]:
        ops, unit_offset = self._ops, self._ops.spec.norm_unit_offset
        of_heads = name.endswith(("q_norm", "k_norm"))

        def hook(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            take = (lambda x: x.detach().flatten(0, -2)) if of_heads else self._rows
            given, weight = take(args[0]), f"model.layers.{index}.{name}.weight"
            self._of_layer[f"{name} input"], self._of_layer[name] = given, take(output)
            shown = "its weight" if unit_offset else "1 + its weight"
            scale_E = module.weight + 1 if unit_offset else module.weight
            self._differences.add(
                name, index, self._of_layer[name], ops.norm(weight, given), summed=given.shape[-1],
                unscaled_TF=self._of_layer[name].float() / scale_E.float(),
                alternatives={
                    f"a product with {shown}": lambda: ops.norm(weight, given, not unit_offset)
                },
            )  # fmt: skip

        return hook

    def _output_hook(self, index: int) -> Callable[..., None]:
        plain = self._rowwise("self_attn.o_proj", index, partial(self._ops.output, index))

        def hook(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            plain(module, args, kwargs, output)
            if "attended" not in self._of_layer:  # within exact_forward
                q, k, v = self._heads(index)
                expected = self._ops.attention(index, *self._ops.rotary(index, q, k), v)
                self._add_attention(index, self._rows(args[0]), expected.flatten(1))

        return hook

    def _heads(self, index: int) -> Iterator[torch.Tensor]:
        """Queries, keys and values before the rotation, [T, heads, D]."""
        spec, found = self._ops.spec, self._of_layer
        num_rows = len(found["self_attn.v_proj"])
        for name, heads in zip("qkv", (spec.num_heads, *[spec.num_kv_heads] * 2), strict=True):
            rows = found.get(f"self_attn.{name}_norm", found[f"self_attn.{name}_proj"])
            rows = rows.reshape(-1, heads, spec.head_dim)
            first = self._first if len(rows) > num_rows else 0  # a norm of heads has all rows
            yield rows[first : first + num_rows]

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
        self._of_layer["mlp"] = found
        rows_T = ~self._of_layer.get("rerouted", torch.zeros_like(given[:, 0]).bool())
        self._differences.add(
            "mlp", index, found[rows_T], self._ops.mlp(index, given)[rows_T],
            summed=self._ops.spec.ffn_size, stages=3,
        )  # fmt: skip

    def _residual(
        self, index: int, has_outer_norms: bool, module: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Compare the layer's two additions, then forget the layer."""
        after = "pre_feedforward_layernorm" if has_outer_norms else "post_attention_layernorm"
        mixed = "post_attention_layernorm" if has_outer_norms else "self_attn.o_proj"
        fed = "post_feedforward_layernorm" if has_outer_norms else "mlp"
        given = self._rows(args[0] if args else kwargs["hidden_states"])
        middle = self._of_layer[f"{after} input"]
        output = self._rows(output[0] if isinstance(output, tuple) else output)
        for trainer, parts in ((middle, (given, self._of_layer[mixed])),
                               (output, (middle, self._of_layer[fed]))):  # fmt: skip
            engine = torch.add(*(each.to(self._ops.model.dtype) for each in parts))
            self._differences.add("residual", index, trainer, engine)
        self._of_layer.clear()

    def _note_head(self, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        self._head_BTV = output.detach()

    def _note_positions(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if given is not None:
            self.positions_T = given[0, self._first :].detach()

    @contextmanager
    def _rotary_wrapped(self) -> Iterator[None]:
        modeling: Any = sys.modules[type(self._target.base_model.layers[0].self_attn).__module__]
        rotary = getattr(modeling, _ROTARY)

        def recorded(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found = rotary(q, k, *args, **kwargs)
            self._rotated = (q, k, *found)
            return found

        setattr(modeling, _ROTARY, recorded)
        try:
            yield
        finally:
            setattr(modeling, _ROTARY, rotary)

    @contextmanager
    def _attention_wrapped(self) -> Iterator[None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        functions = ALL_ATTENTION_FUNCTIONS
        modeling: Any = sys.modules[type(self._target.base_model.layers[0].self_attn).__module__]
        name = self._target.config._attn_implementation
        own = functions._local_mapping.get(name)
        attend = functions.get(name, modeling.eager_attention_forward)

        def recorded(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            given = module, q, k, v, *args
            found = attend(*given, **kwargs)
            self.dropout = max(self.dropout, kwargs.get("dropout") or 0.0)
            masks = [mask for mask in args[:1] if mask is not None]
            is_plain = name == "sdpa" or any(mask.dim() != 4 for mask in masks)
            outputs = found[0], (found if is_plain else functions["sdpa"](*given, **kwargs))[0]
            self._attended(module.layer_idx, kwargs.get("sliding_window"), (q, k, v), outputs)
            return found

        functions[name] = recorded
        try:
            yield
        finally:
            del functions[name]
            if own is not None:
                functions[name] = own

    def _attended(
        self,
        index: int,
        given: int | None,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Compare the rotation before an attention, and the attention. ``given``: its window;
        ``outputs``: its own, and that of torch's attention."""
        ops, window = self._ops, self._ops.spec.window_of(index)
        if self._rotated is not None:
            before = [self._rows(each.transpose(1, 2)) for each in self._rotated]
            engine = ops.rotary(index, before[0], before[1])
            for own, other in zip(before[2:], engine, strict=True):
                self._differences.add("self_attn.rotary", index, own, other, stages=4)
            self._rotated = None
        q, k, v = (self._rows(each.transpose(1, 2)) for each in inputs)
        near = {size + by for size in (window, given) if size for by in (-1, 0, 1)}
        alternatives = {
            f"a window of {size}": partial(ops.attention, index, q, k, v, size)
            for size in sorted(near - {0, window})
        }
        if window is not None:
            alternatives["no window"] = partial(ops.attention, index, q, k, v, None)
        attended, plain = (self._rows(each) for each in outputs)
        expected = ops.attention(index, q, k, v)
        self._of_layer["attended"] = attended
        self._add_attention(index, attended, expected, alternatives=alternatives)
        for side, output in enumerate((attended, plain)):
            self.attention_squares[side] += relative_difference(output, expected)[1] ** 2
