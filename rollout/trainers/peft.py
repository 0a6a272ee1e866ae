"""LoRA adapters merged into the weights as they are streamed, or streamed alone; the trainer's
model stays as it is.

Each sum is rounded where PEFT's own merge rounds it, so the stream is bitwise what
``merge_and_unload`` of a copy would leave, on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.tuners.lora import Embedding, Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import PeftType
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from rollout.errors import InvalidInputError
from rollout.trainers.param_ref import Combine, ParamRef, Weight, unwrapped
from rollout.weights.adapter_folder import ADDED_INITS
from rollout.weights.lora import LORA_A, LORA_B, LoraScaling, joined_scaling, lora_delta
from rollout.weights.wrapped_names import checkpoint_name

_RefsByOwner = dict[tuple[int, str], ParamRef]  # by id of the module, and attribute


@dataclass(frozen=True, slots=True)
class Adapter:
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
    """Adds adapters to a weight. The inputs are the weight, then A and B of each adapter, then
    those of adapters that the weight has already."""

    adapters: tuple[Adapter, ...]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        value = tensors[0].clone()
        for index, adapter in enumerate(self.adapters):
            adapter.add(value, tensors[2 * index + 1], tensors[2 * index + 2])
        return value


@dataclass(frozen=True, slots=True)
class AddBiases:
    """Adds biases of adapters to a bias. The inputs are the bias, then those of each adapter."""

    scalings: tuple[float, ...]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        value = tensors[0].clone()
        for scaling, bias in zip(self.scalings, tensors[1:], strict=True):
            value += bias * scaling
        return value


def adapter_weights(model: nn.Module, refs: Sequence[ParamRef]) -> list[Weight]:
    """A and B of each adapted weight, and whole what else is trained, or what some adapter of the
    model replaces or adds a bias to: for an engine that has the base.

    The whole tensors are the same ones whichever adapter is active, so that none of an earlier
    adapter stays in the engine.

    Raises what `merged_weights` does, and InvalidInputError for what only a merge can express.
    """
    _require_engines_base(model)
    found: list[Weight] = []
    is_replaced = _replaced(model)
    for weight in merged_weights(model, refs):
        match weight.combine, weight.inputs:
            case None, (ref,):
                found += [weight] if ref.parameter.requires_grad or is_replaced(ref) else []
            case Merge(adapters=(Adapter(is_embedding=False, fan_in_fan_out=False),)), (_, a, b):
                stem = weight.name.removesuffix("weight")
                found.append(Weight(f"{stem}{LORA_A}.weight", (a,)))
                found.append(Weight(f"{stem}{LORA_B}.weight", (b,)))
            case AddBiases(), _:
                found.append(weight)
            case _:
                raise InvalidInputError(
                    "adapters_only", weight.name,
                    "its adapter is not one A and B of a linear layer: have it merged",
                )  # fmt: skip
    return found


def lora_scaling(model: nn.Module, refs: Sequence[ParamRef]) -> LoraScaling:
    """The scaling of adapters that `adapter_weights` takes. Raises InvalidInputError for none."""
    found = {
        weight.name: weight.combine.adapters[0].scaling
        for weight in merged_weights(model, refs)
        if isinstance(weight.combine, Merge)
    }
    if not found:
        raise InvalidInputError("adapters_only", True, "no adapter of the model is active")
    return joined_scaling(found)


def merged_weights(model: nn.Module, refs: Sequence[ParamRef]) -> list[Weight]:
    """The base model's weights under its own names, active adapters merged.

    Raises InvalidInputError for tuners other than LoRA and variants of it (DoRA, ...), for
    disabled adapters, LoRA on tied tensors, and an adapter's bias where the base has none.
    """
    _refuse_other_tuners(model)
    refs_by_owner = {(id(ref.module), ref.attribute): ref for ref in refs}
    tied = _tied(model)
    merges: dict[tuple[int, str], tuple[list[ParamRef], Combine | None]] = {}
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
            inner = {
                id(inner)
                for child_name, child in module.named_children()
                if child_name != "base_layer"
                for inner in child.modules()
            }
            hidden |= inner
            for attribute, inputs, combine in _merges(name, module, refs_by_owner):
                if id(getattr(base, attribute)) in tied:
                    raise InvalidInputError(
                        "model", name,
                        "LoRA on a tensor tied to another cannot be merged: untie them first",
                    )  # fmt: skip
                merges[id(base), attribute] = (inputs, combine)
            if module.merged_adapters:
                added, how = merges.get((id(base), "weight"), ([], None))
                merges[id(base), "weight"] = ([*added, *_in_place(module, refs, inner)], how)
    twins = {
        id(parameter): f"{name}.{attribute}"
        for name, module in model.named_modules()
        if id(module) not in hidden
        for attribute, parameter in module.named_parameters(recurse=False)
    }
    return list(_weights(refs, hidden, twins, renamed, merges))


def _weights(
    refs: Sequence[ParamRef],
    hidden: set[int],
    twins: dict[int, str],  # by id of the parameter, its name in a module that is not hidden
    renamed: dict[int, tuple[str, str]],
    merges: dict[tuple[int, str], tuple[list[ParamRef], Combine | None]],
) -> Iterator[Weight]:
    for ref in refs:
        if id(ref.module) in hidden:
            if (twin := twins.get(id(ref.parameter))) is not None:
                yield Weight(checkpoint_name(twin), (ref,))
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
            if unwrapped(layer.get_base_layer()).bias is None:
                raise InvalidInputError(
                    "model", biases[-1].name,
                    "its layer has no bias to add it to: train with lora_bias=False",
                )  # fmt: skip
    if adapters:
        yield "weight", inputs, Merge(tuple(adapters))
    if biases:
        scalings = [adapter.scaling for adapter in adapters if layer.lora_bias[adapter.name]]
        yield "bias", biases, AddBiases(tuple(scalings))


def _in_place(layer: LoraLayer, refs: Sequence[ParamRef], inner: set[int]) -> list[ParamRef]:
    """The parameters of a layer's adapters whose values are merged into its base in place."""
    merged = set(layer.merged_adapters)
    return [ref for ref in refs if id(ref.module) in inner and merged & {*ref.name.split(".")}]


def _tied(model: nn.Module) -> set[int]:
    """Ids of parameters that have two names."""
    seen: set[int] = set()
    tied: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def _refuse_other_tuners(model: nn.Module) -> None:
    for module in model.modules():
        config = module.active_peft_config if isinstance(module, PeftModel) else None
        if config is not None and config.peft_type != PeftType.LORA:
            kind = type(config).__name__
            raise InvalidInputError("model", kind, "only LoRA adapters can be merged into weights")


def _replaced(model: nn.Module) -> Callable[[ParamRef], bool]:
    """Whether some adapter of the model, active or not, has its own value for a parameter, or a
    bias to add."""
    saved: set[int] = set()
    biased: set[int] = set()
    trains_biases = False
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved |= {id(inner) for inner in module.modules()}
        elif isinstance(module, LoraLayer) and any(module.lora_bias.values()):
            biased.add(id(unwrapped(module.get_base_layer())))
        elif isinstance(configs := getattr(module, "peft_config", None), dict):
            kinds = {getattr(each, "bias", "none") for each in configs.values()}
            trains_biases |= kinds != {"none"}
    return lambda ref: (
        id(ref.module) in saved
        or (ref.attribute == "bias" and (trains_biases or id(ref.module) in biased))
    )


def _require_engines_base(model: nn.Module) -> None:
    """Raise where the base is another than the engine has: changed by an adapter's initialization,
    or with tied tensors of which one is now trained without its twin."""
    tied = _tied(model)
    for name, module in model.named_modules():
        for adapter, config in (getattr(module, "peft_config", None) or {}).items():
            init = getattr(config, "init_lora_weights", None)
            if init not in ADDED_INITS:
                remedy = f"init_lora_weights={init!r} changed the base: have it merged"
                raise InvalidInputError("adapters_only", adapter, remedy)
        if isinstance(module, ModulesToSaveWrapper):
            saved, _ = _saved_module(module, name)
            original = module.original_module.parameters()
            if any(id(each) in tied for each in original) and not any(
                id(each) in tied for each in saved.parameters()
            ):
                remedy = "is tied to another that is not trained: set ensure_weight_tying=True"
                raise InvalidInputError("adapters_only", name, remedy)


def _require_enabled(name: str, layer: BaseTunerLayer | AuxiliaryTrainingWrapper) -> None:
    if layer.disable_adapters:
        raise InvalidInputError("model", name, "its adapters are disabled; enable them to stream")


def _unsupported(name: str, part: object) -> InvalidInputError:
    return InvalidInputError(
        "model", f"{name}: {type(part).__name__}", "only plain LoRA adapters can be merged"
    )
