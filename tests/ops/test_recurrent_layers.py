"""The short convolution and the gated delta rule: against their references, and states along runs
and trees. tests/models compares the layers with those of transformers.

States that no row of the plan reads are NaN, and so is the slot of no state.
"""

from __future__ import annotations

import os

import pytest
import torch

from rollout.ops import gpu
from rollout.ops.causal_conv import causal_conv
from rollout.ops.causal_conv import native as native_conv
from rollout.ops.causal_conv import reference as conv_reference
from rollout.ops.gated_delta_rule import gated_delta_rule
from rollout.ops.gated_delta_rule import native as native_rule
from rollout.ops.gated_delta_rule import reference as rule_reference
from rollout.ops.state_plan import StatePlan
from tests.helpers.state_cases import Step, make_plan, random_steps

SOURCES = 8
FEW = os.environ.get("TRITON_INTERPRET") == "1"  # the interpreter is slow
TREE = Step(run_len=3, nodes=[0, 0, 1, 2, 2, 4, 4, 3], source=2)


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


class Layer:
    """``inputs`` and ``states`` of some steps: numbers where an entry begins, NaN elsewhere."""

    def __init__(self, steps: list[Step], dtype: torch.dtype, device, *state: int) -> None:
        rows = sum(step.num_rows for step in steps)
        self.inputs = [tensor.to(device) for tensor in self.make(rows, dtype)]
        states = torch.full((SOURCES + 1 + rows, *state), torch.nan)
        for step in steps:
            states[step.source] = torch.randn(state)
        states[0] = torch.nan
        self.states = states.to(device, self.state_dtype(dtype))

    def run(self, steps: list[Step], rows=slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs, and the state after every row that keeps one (NaN: it does not)."""
        plan, states = make_plan(steps, SOURCES + 1, self.states.device), self.states.clone()
        out = self.op([tensor[rows] for tensor in self.inputs], states, plan)
        assert out.is_contiguous()
        has_target = plan.targets_T > 0
        targets = plan.targets_T[has_target].long()
        kept = torch.full((len(out), *states.shape[1:]), torch.nan).to(states)
        kept[has_target] = states[targets]
        states[targets] = self.states[targets]
        assert_bitwise(states, self.states)  # nothing else was written
        return out, kept

    def on_cpu(self, steps: list[Step]) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states by the reference."""
        plan, states = make_plan(steps, SOURCES + 1), self.states.cpu().clone()
        return self.reference([tensor.cpu() for tensor in self.inputs], states, plan), states


class Convolution(Layer):
    def __init__(self, steps, dtype, device, channels: int = 40, taps: int = 4) -> None:
        torch.manual_seed(channels)
        self.channels = channels
        weights = torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype)
        self.weights = [tensor.to(device) for tensor in weights]
        super().__init__(steps, dtype, device, channels, taps - 1)
        tensors = (*self.inputs, *self.weights, self.states)
        assert native_conv.supports(*tensors) or gpu.supports(*tensors)

    def make(self, rows, dtype):
        return [torch.randn(rows, self.channels + 4).to(dtype)[:, : self.channels]]

    def state_dtype(self, dtype):
        return dtype

    def op(self, inputs, states, plan):
        return causal_conv(*inputs, *self.weights, states, plan)

    def reference(self, inputs, states, plan):
        weights = (tensor.cpu() for tensor in self.weights)
        return conv_reference.causal_conv(*inputs, *weights, states, plan)


class DeltaRule(Layer):
    """q, k and v are views into one convolved row."""

    def __init__(self, steps, dtype, device, shape=(1, 2, 24, 20)) -> None:
        torch.manual_seed(shape[2])
        self.shape = shape
        super().__init__(steps, dtype, device, *shape[1:])
        assert native_rule.supports(*self.inputs, self.states) or gpu.supports(self.inputs[0])

    def make(self, rows, dtype):
        key_heads, heads, key_dim, value_dim = self.shape
        keys = key_heads * key_dim
        mixed = torch.randn(rows, 2 * keys + heads * value_dim).to(dtype)
        q, k, v = mixed.split([keys, keys, heads * value_dim], dim=1)
        queries, others = (x.unflatten(1, (key_heads, key_dim)) for x in (q, k))
        values = v.unflatten(1, (heads, value_dim))
        return [queries, others, values, -torch.rand(rows, heads) / 2, torch.rand(rows, heads)]

    def state_dtype(self, dtype):
        return torch.float32

    def op(self, inputs, states, plan):
        return gated_delta_rule(*inputs, states, plan)

    def reference(self, inputs, states, plan):
        return rule_reference.gated_delta_rule(*inputs, states, plan)


SHAPES = {
    Convolution: [(1, 4), (7, 1), (160, 8), (600, 3)],
    DeltaRule: [((1, 1, 1, 1),), ((2, 4, 16, 16),), ((1, 3, 7, 100),), ((1, 2, 128, 9),)],
}


@pytest.mark.parametrize("layer", SHAPES)
def test_it_is_the_reference(dtype, device, layer) -> None:
    rtol = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    tolerance = {"rtol": 0, "atol": 0} if layer is Convolution else {"rtol": 1e-5, "atol": 4e-6}
    for seed, shape in enumerate(SHAPES[layer]):
        steps = random_steps(seed, 2 if FEW else 4, SOURCES)
        case = layer(steps, dtype, device, *shape)
        out, kept = (tensor.cpu() for tensor in case.run(steps))
        expected, states = case.on_cpu(steps)
        torch.testing.assert_close(out, expected, rtol=rtol, atol=4e-6)
        plan = make_plan(steps, SOURCES + 1)
        has_target = plan.targets_T > 0
        wanted = states[plan.targets_T[has_target].long()]
        torch.testing.assert_close(kept[has_target], wanted, **tolerance)
        assert kept[~has_target].isnan().all()


@pytest.mark.parametrize("layer", [Convolution, DeltaRule])
def test_rows_do_not_depend_on_the_batch(compared_dtype, device, set_threads, layer) -> None:
    steps = random_steps(0, 4 if FEW else 7, SOURCES)
    shape = (300,) if layer is Convolution else ((1, 2, 32, 24),)
    case = layer(steps, compared_dtype, device, *shape)
    set_threads(2)
    out, kept = case.run(steps)
    set_threads(1)
    end = 0
    for step in steps:
        rows = slice(end, end := end + step.num_rows)
        alone, alone_kept = case.run([step], rows)
        assert_bitwise(alone, out[rows])
        assert_bitwise(alone_kept, kept[rows])


@pytest.mark.parametrize("layer", [Convolution, DeltaRule])
@pytest.mark.parametrize("leaf", [5, 8])
def test_a_path_of_a_tree_is_a_run_is_one_by_one(compared_dtype, device, layer, leaf) -> None:
    """Checkpoints within the run, which the tree's run has none of, change nothing."""
    case = layer([TREE], compared_dtype, device)
    out, kept = case.run([TREE])
    rows = [*range(TREE.run_len), *(TREE.row_of(node) for node in TREE.path(leaf))]
    chain = Step(run_len=len(rows), source=2, checkpoints=list(range(len(rows))))
    chain_out, chain_kept = case.run([chain], rows)
    assert_bitwise(chain_out, out[rows])
    has_kept = range(TREE.run_len - 1, len(rows))
    assert_bitwise(chain_kept[has_kept], kept[rows][has_kept])
    for place, row in enumerate(rows[1:], start=1):
        case.states[1] = chain_kept[place - 1]
        row_out, row_kept = case.run([Step(run_len=1, source=1)], [row])
        assert_bitwise(row_out[0], out[row])
        assert_bitwise(row_kept[0], chain_kept[place])


@pytest.mark.parametrize("layer", [Convolution, DeltaRule])
@pytest.mark.parametrize("entries", [0, 1])
def test_padding_comes_out_as_zeros_and_has_no_state(device, layer, entries: int) -> None:
    steps = [Step(run_len=3, source=1)] * entries
    case = layer([*steps, Step(run_len=2)], torch.float32, device)
    rows = slice(3 * entries)
    expected, _ = case.run(steps, rows)
    for tensor in case.inputs:
        tensor[-2:] = torch.nan
    plan, more = make_plan(steps, SOURCES + 1, device), torch.zeros(2).int().to(device)
    padded = StatePlan(
        q_offsets_B1=plan.q_offsets_B1,
        sources_B=plan.sources_B,
        parents_T=torch.cat((plan.parents_T, more - 1)),
        targets_T=torch.cat((plan.targets_T, more)),
    )
    out = case.op(case.inputs, case.states, padded)
    assert_bitwise(out[rows], expected)
    assert not out[-2:].any()
    assert case.states[0].isnan().all()


@pytest.mark.parametrize("layer", [Convolution, DeltaRule])
def test_a_plan_that_contradicts_itself_is_refused(is_gpu, layer) -> None:
    if is_gpu:
        pytest.skip("only the CPU looks")
    steps = [Step(run_len=3), Step(run_len=2)]
    for field, row, value, error in (
        ("parents_T", 1, 1, "parents_T"),  # itself
        ("parents_T", 4, 2, "parents_T"),  # of another entry
        ("parents_T", 2, 0, "targets_T"),  # further back, and kept nowhere
        ("targets_T", 2, 99, "targets_T"),
        ("sources_B", 1, -1, "sources_B"),
        ("q_offsets_B1", 1, 6, "q_offsets_B1"),
    ):
        case, plan = layer(steps, torch.float32, "cpu"), make_plan(steps, 1)
        getattr(plan, field)[row] = value
        with pytest.raises((ValueError, IndexError), match=error):
            case.op(case.inputs, case.states, plan)
