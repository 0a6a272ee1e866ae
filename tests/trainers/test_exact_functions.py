"""Autograd of the exact forward: each plain function is its op, and differentiated right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rollout.models.experts_config import ExpertsSpec
from rollout.ops.glu import gelu_mul, silu_mul
from rollout.trainers.exact import functions, token_logprobs
from rollout.trainers.exact.experts import ExactExperts, ExactRouter
from rollout.trainers.exact.modules import ExactMlp, ExactNorm

EXPERTS = ExpertsSpec(layers=(0,), num_experts=5, experts_per_token=2, ffn_size=6)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def linear(inputs: int, outputs: int):
    weight = random(outputs, inputs)
    return lambda x: x @ weight.to(x.dtype).t()


def norm(unit_offset: bool):
    def build(weight: torch.Tensor):
        return ExactNorm(SimpleNamespace(weight=weight), 1e-5, unit_offset)

    return lambda x, weight: build(weight)(x), (random(2, 3, 10), random(10))


def mlp(activation):
    module = SimpleNamespace(gate_proj=linear(4, 6), up_proj=linear(4, 6), down_proj=linear(6, 4))
    return ExactMlp(module, SimpleNamespace(activation=activation)), (random(2, 3, 4),)


def logprobs(temperature: float):
    ids = torch.tensor([[1, 4, 0], [8, 2, 2]])
    return lambda logits: token_logprobs(logits, ids, temperature), (random(2, 3, 9),)


def product():
    def run(x, weight, bias):
        return functions.product(lambda rows: rows @ weight.t() + bias, x, weight, bias)

    return run, (random(2, 3, 4), random(6, 4), random(6))


def router(normalizes: bool):
    spec = SimpleNamespace(
        num_experts=5, experts_per_token=2, normalizes=normalizes, groups=EXPERTS.groups
    )
    exact = ExactRouter.__new__(ExactRouter)
    exact._spec = spec
    exact.product = lambda x: x  # of logits
    return lambda logits: exact(logits)[1], (random(7, 5),)


def experts():
    chosen = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0]])  # two of five get none

    def run(x, gate_up, down, weights):
        module = SimpleNamespace(gate_up_proj=gate_up, down_proj=down)
        if x.dtype is torch.float64:  # the engine has no such ops: the plain function alone
            exact = ExactExperts.__new__(ExactExperts)
            exact._module, exact._num_experts = module, 5
        else:
            gate = SimpleNamespace(weight=torch.zeros(5, 4))
            router = ExactRouter(gate, EXPERTS, 4, torch.float32)
            exact = ExactExperts(module, EXPERTS, router)
        return exact(x, chosen, weights)

    return run, (random(4, 4), random(5, 12, 4), random(5, 4, 6), random(4, 2).softmax(-1))


CASES = {
    "norm": norm(False),
    "norm by 1 + weight": norm(True),
    "silu": mlp(silu_mul),
    "gelu": mlp(gelu_mul),
    "logprobs": logprobs(0.7),
    "greedy logprobs": logprobs(0.0),
    "product": product(),
    "router": router(False),
    "router whose weights add up to 1": router(True),
    "experts": experts(),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plain_function_is_the_op(name, monkeypatch) -> None:
    function, given = CASES[name]
    op = function(*given)
    for module in ("modules", "logprobs", "experts"):
        monkeypatch.setattr(
            f"rollout.trainers.exact.{module}.exactly", lambda op, plain, *own: plain(*own)
        )
    torch.testing.assert_close(op, function(*given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_finite_differences(name, monkeypatch) -> None:
    """In float64, which the ops do not have: with the plain function in the op's place."""
    function, given = CASES[name]

    def by_plain(op, plain, *own):
        return functions.exactly(plain, plain, *own)

    for module in ("modules", "logprobs", "experts"):
        monkeypatch.setattr(f"rollout.trainers.exact.{module}.exactly", by_plain)
    if "router" in name:
        monkeypatch.setattr("rollout.trainers.exact.experts.route", chosen_in_float32)
    wide = [each.double().requires_grad_() for each in given]
    assert torch.autograd.gradcheck(function, wide)


def chosen_in_float32(logits, experts_per_row, normalizes, groups):
    from rollout.ops.routing import route

    return route(logits.float(), experts_per_row, normalizes, groups)
