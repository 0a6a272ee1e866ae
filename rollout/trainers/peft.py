"""LoRA adapters merged into the weights as they are streamed, or streamed alone; the trainer's
model stays as it is.

Each sum is rounded where PEFT's own merge rounds it, so the stream is bitwise what
``merge_and_unload`` of a copy would leave, on the same device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.tuners.lora import Embedding, Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from rollout.errors import InvalidInputError
from rollout.trainers.param_ref import Combine, ParamRef, Weight, checkpoint_name, unwrapped
from rollout.weights.lora import lora_delta

_RefsByOwner = dict[tuple[int, str], ParamRef]  # by id of the module, and attribute


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter of one layer."""

    name: str
    scaling: float
    fan_in_fan_out: bool  # the weight is held transposed
    is_embedding: bool

    def add(self, value: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """``value += scaling * B @ A`` in place; of an embedding the transpose of that."""
        transposed = self.fan_in_fan_out or self.is_embedding
        delta = lora_delta(a, b, self.scaling, transposed=transposed)
        value += delta.to(value.dtype) if self.is_embedding else delta


@dataclass(frozen=True, slots=True)
class Merge:
    """Adds adapters to a weight. The inputs are the weight, then A and B of each adapter."""

    adapters: tuple[Adapter, ...]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        value = tensors[0].clone()
        for index, adapter in enumerate(self.adapters):
            adapter.add(value, tensors[2 * index + 1], tensors[2 * index + 2])
        return value


def adapter_weights(model: nn.Module, refs: Sequence[ParamRef]) -> list[Weight]:
    """A and B of each adapted weight, and whole what else is trained: for an engine that has the
    base.

    Raises what `merged_weights` does, and InvalidInputError for what only a merge can express.
    """
    found: list[Weight] = []
    for weight in merged_weights(model, refs):
        match weight.combine:
            case None:
                found += [weight] if weight.inputs[0].parameter.requires_grad else []
            case Merge(adapters=(Adapter(is_embedding=False, fan_in_fan_out=False),)):
                stem = weight.name.removesuffix("weight")
                for kind, ref in zip(("lora_A", "lora_B"), weight.inputs[1:], strict=True):
                    found.append(Weight(f"{stem}{kind}.weight", (ref,)))
            case _:
                raise InvalidInputError(
                    "adapters_only", weight.name,
                    "its adapter is not one A and B of a linear layer: have it merged",
                )  # fmt: skip
    return found


def lora_scaling(model: nn.Module, refs: Sequence[ParamRef]) -> float:
    """The one scaling of all adapters. Raises InvalidInputError where they differ, or none are."""
    found = {
        adapter.scaling
        for weight in merged_weights(model, refs)
        if isinstance(weight.combine, Merge)
        for adapter in weight.combine.adapters
    }
    if len(found) != 1:
        raise InvalidInputError(
            "adapters_only", sorted(found), "adapters need one scaling: have them merged"
        )
    return found.pop()


def merged_weights(model: nn.Module, refs: Sequence[ParamRef]) -> list[Weight]:
    """The base model's weights under its own names, active adapters merged.

    Raises InvalidInputError for tuners other than LoRA and variants of it (DoRA, ...), for prompt
    tuning, disabled adapters, and LoRA on tied tensors.
    """
    _refuse_prompt_learning(model)
    refs_by_owner = {(id(ref.module), ref.attribute): ref for ref in refs}
    tied = _tied(model)
    merges: dict[tuple[int, str], tuple[list[ParamRef], Combine]] = {}
    hidden: set[int] = set()  # modules that hold no weight of the merged model
    renamed: dict[int, tuple[str, str]] = {}  # what their names begin with, what they should
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved, path = _saved_module(module, name)
            hidden |= {id(inner) for inner in module.modules()} - {
                id(inner) for inner in saved.modules()
            }
            names = (checkpoint_name(f"{name}.{path}"), checkpoint_name(name))
            renamed |= {id(inner): names for inner in saved.modules()}
        elif isinstance(module, AuxiliaryTrainingWrapper):
            raise _unsupported(name, module)
        elif isinstance(module, BaseTunerLayer):
            if type(module) not in (Linear, Embedding):
                raise _unsupported(name, module)
            base = unwrapped(module.get_base_layer())
            for child_name, child in module.named_children():
                if child_name != "base_layer":
                    hidden |= {id(inner) for inner in child.modules()}
            for attribute, inputs, combine in _merges(name, module, refs_by_owner):
                if id(getattr(base, attribute)) in tied:
                    raise InvalidInputError(
                        "model", name,
                        "LoRA on a tensor tied to another cannot be merged: untie them first",
                    )  # fmt: skip
                merges[id(base), attribute] = (inputs, combine)
    return list(_weights(refs, hidden, renamed, merges))


def _weights(
    refs: Sequence[ParamRef],
    hidden: set[int],
    renamed: dict[int, tuple[str, str]],
    merges: dict[tuple[int, str], tuple[list[ParamRef], Combine]],
) -> Iterator[Weight]:
    for ref in refs:
        if id(ref.module) in hidden:
            continue
        old, new = renamed.get(id(ref.module), ("", ""))
        name = new + checkpoint_name(ref.name).removeprefix(old)
        inputs, combine = merges.get((id(ref.module), ref.attribute), ([], None))
        yield Weight(name, (ref, *inputs), combine)


def _saved_module(wrapper: ModulesToSaveWrapper, name: str) -> tuple[nn.Module, str]:
    """The module that stands for the wrapped one, and where the wrapper holds it."""
    _require_enabled(name, wrapper)
    if not wrapper.active_adapters:
        return wrapper.original_module, "original_module"
    (adapter,) = wrapper.active_adapters
    return wrapper.modules_to_save[adapter], f"modules_to_save.{adapter}"


def _merges(
    name: str, layer: LoraLayer, refs_by_owner: _RefsByOwner
) -> Iterator[tuple[str, list[ParamRef], Combine]]:
    """The additions to a layer's tensors: attribute of its base, inputs, how they are added.

    Adapters that were merged into the base in place are left out.
    """
    _require_enabled(name, layer)
    is_embedding = isinstance(layer, Embedding)
    held = layer.lora_embedding_A if is_embedding else layer.lora_A
    adapters: list[Adapter] = []
    inputs: list[ParamRef] = []
    biases: list[ParamRef] = []
    for adapter in layer.active_adapters:
        if adapter not in held or adapter in layer.merged_adapters:
            continue
        if adapter in layer.lora_variant:
            raise _unsupported(name, layer.lora_variant[adapter])
        fan_in_fan_out = not is_embedding and layer.fan_in_fan_out
        adapters.append(Adapter(adapter, layer.scaling[adapter], fan_in_fan_out, is_embedding))
        if is_embedding:
            inputs += [
                refs_by_owner[id(unwrapped(layer.lora_embedding_A)), adapter],
                refs_by_owner[id(unwrapped(layer.lora_embedding_B)), adapter],
            ]
            continue
        b = unwrapped(layer.lora_B[adapter])
        inputs += [
            refs_by_owner[id(unwrapped(layer.lora_A[adapter])), "weight"],
            refs_by_owner[id(b), "weight"],
        ]
        if layer.lora_bias[adapter]:
            biases.append(refs_by_owner[id(b), "bias"])
    if adapters:
        yield "weight", inputs, Merge(tuple(adapters))
    if biases:
        scalings = [adapter.scaling for adapter in adapters if layer.lora_bias[adapter.name]]
        yield "bias", biases, lambda tensors: _with_biases(scalings, tensors)


def _with_biases(scalings: Sequence[float], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    value = tensors[0].clone()
    for scaling, bias in zip(scalings, tensors[1:], strict=True):
        value += bias * scaling
    return value


def _tied(model: nn.Module) -> set[int]:
    """Ids of parameters that have two names."""
    seen: set[int] = set()
    tied: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def _refuse_prompt_learning(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, PeftModel) and module.active_peft_config.is_prompt_learning:
            kind = type(module.active_peft_config).__name__
            raise InvalidInputError("model", kind, "only LoRA adapters can be merged into weights")


def _require_enabled(name: str, layer: BaseTunerLayer | AuxiliaryTrainingWrapper) -> None:
    if layer.disable_adapters:
        raise InvalidInputError("model", name, "its adapters are disabled; enable them to stream")


def _unsupported(name: str, part: object) -> InvalidInputError:
    return InvalidInputError(
        "model", f"{name}: {type(part).__name__}", "only plain LoRA adapters can be merged"
    )
