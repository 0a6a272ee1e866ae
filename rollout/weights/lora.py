"""LoRA adapters that come in place of weights: the engine adds them to the weights they belong to.

The names are PEFT's: of a weight ``NAME.weight`` come ``NAME.lora_A.weight`` [r, in] and
``NAME.lora_B.weight`` [out, r], behind ``base_model.model.`` or not, with the adapter's name inside
or not. Each sum is rounded where PEFT's own merge rounds it, so it is bitwise what a full update of
the merged weights brings, on the same kind of device, in the base's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rollout.errors import InvalidInputError
from rollout.models.layers.weight_loader import WeightLoader
from rollout.weights.manifest import TensorSpec

LoraScaling = float | Mapping[str, float]
"""The factor of ``B @ A``: of all adapters, or of each by its weight's name."""

LORA_A, LORA_B = "lora_A", "lora_B"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")


def split_lora_name(name: str) -> tuple[str, str] | None:
    """The adapted weight's name and which of the two this is; None for other tensors."""
    found = _NAME.fullmatch(name)
    return None if found is None else (f"{found[1]}.weight", f"lora_{found[2]}")


def joined_scaling(by_weight: Mapping[str, float]) -> LoraScaling:
    """The one scaling of these weights' adapters, where they have one."""
    return next(iter(by_weight.values())) if len({*by_weight.values()}) == 1 else by_weight


def lora_delta(
    a: torch.Tensor, b: torch.Tensor, scaling: float, *, transposed: bool = False
) -> torch.Tensor:
    """``scaling * B @ A``, of a weight that is held ``transposed`` the transpose of that."""
    half_on_cpu = b.device.type == "cpu" and b.dtype in (torch.float16, torch.bfloat16)
    product = b.float() @ a.float() if half_on_cpu else b @ a
    delta = (product.T if transposed else product) * scaling
    return delta.to(b.dtype) if half_on_cpu else delta


def adapted_spec(
    name: str, a: TensorSpec, b: TensorSpec, loader: WeightLoader | None
) -> TensorSpec:
    """The adapted weight's. Raises InvalidInputError for shapes that do not fit it."""
    shape = (*b.shape[:1], *a.shape[1:])
    if loader is None:
        return TensorSpec(shape, b.dtype)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or shape != loader.shape:
        raise InvalidInputError(
            f"named_tensors[{name!r}]", f"A {a}, B {b}",
            f"must be [r, in] and [out, r] of a weight {list(loader.shape)}",
        )  # fmt: skip
    if a.shape[0] > max(shape):  # receivers allocate what was announced
        raise InvalidInputError(f"named_tensors[{name!r}]", a, f"r must be at most {max(shape)}")
    return TensorSpec(shape, loader.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class LoraChange:
    """An adapter of one weight."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    scaling: float | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapter that was sent."""
        return self.a.nbytes + self.b.nbytes

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose values must be finite."""
        return self.a, self.b

    def check(self, loader: WeightLoader) -> None:
        """Raises InvalidInputError where the update does not say how adapters are scaled."""
        if self.scaling is None:
            raise InvalidInputError(
                "lora_scaling", None,
                f"{self.name} needs it: lora_alpha / r, or / sqrt(r) for rsLoRA",
            )  # fmt: skip

    def applied(self, stored: torch.Tensor, loader: WeightLoader) -> torch.Tensor:
        """This rank's slice of weight plus adapter. Changes ``stored``, its slice of the weight."""
        assert self.scaling is not None
        a, b = self.a.to(stored.device), self.b.to(stored.device)
        stored += loader.own(lora_delta(a, b, self.scaling))
        return stored
