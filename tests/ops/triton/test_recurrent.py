"""Convolution, gated delta rule and gates: against their references, and along runs and trees.

States that no row of the plan reads are NaN, and so is the slot of no state.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from rollout.ops.causal_conv import reference as conv_reference
from rollout.ops.causal_conv import triton as conv_triton
from rollout.ops.delta_gates import reference as delta_gates_reference
from rollout.ops.delta_gates import triton as delta_gates_triton
from rollout.ops.gated_delta_rule import reference as delta_rule_reference
from rollout.ops.gated_delta_rule import triton as delta_rule_triton
from rollout.ops.gated_rms_norm import reference as gated_rms_norm_reference
from rollout.ops.gated_rms_norm import triton as gated_rms_norm_triton
from rollout.ops.rms_norm import reference as rms_norm_reference
from rollout.ops.rms_norm import triton as rms_norm_triton
from rollout.ops.sigmoid_gate import reference as sigmoid_gate_reference
from rollout.ops.sigmoid_gate import triton as sigmoid_gate_triton
from rollout.ops.state_plan import StatePlan
from tests.helpers.state_cases import Step, make_plan, random_steps

SOURCES = 6
EPS = 1e-6
TREE = Step(run_len=3, nodes=[0, 0, 1, 2, 2, 4], source=2)
CHAINS = [Step(run_len=5, source=2, checkpoints=[2, 3]), Step(run_len=6, source=2, checkpoints=[2, 3, 4])]  # fmt: skip  # noqa: E501
PATHS = [[0, 1, 2, 3, 5], [0, 1, 2, 4, 6, 8]]  # rows of TREE: nodes 1 3, and 2 4 6


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    rtol = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.cpu(), expected, rtol=rtol, atol=4e-6)


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def make_states(steps: list[Step], *shape: int) -> torch.Tensor:
    """Numbers where an entry begins, NaN elsewhere."""
    rows = sum(step.num_rows for step in steps)
    states = torch.full((SOURCES + 1 + rows, *shape), torch.nan)
    for step in steps:
        states[step.source] = torch.randn(shape)
    states[0] = torch.nan
    return states


def kept_states(states: torch.Tensor, plan: StatePlan) -> torch.Tensor:
    """By row; NaN where none is kept."""
    kept = torch.full((len(plan.targets_T), *states.shape[1:]), torch.nan)
    has_target = plan.targets_T.cpu() > 0
    kept[has_target] = states.float().cpu()[plan.targets_T.cpu()[has_target].long()]
    return kept


class Convolution:
    def __init__(self, steps: list[Step], dtype, device, channels: int = 20, taps: int = 4) -> None:
        torch.manual_seed(channels)
        rows = sum(step.num_rows for step in steps)
        self.x = torch.randn(rows, channels + 4)[:, :channels].to(dtype).to(device)
        self.rest = [torch.randn(channels, taps), torch.randn(channels)]
        self.rest = [tensor.to(device, dtype) for tensor in self.rest]
        self.states = make_states(steps, channels, taps - 1).to(device, dtype)

    def run(self, steps: list[Step], rows: list[int], op=conv_triton.causal_conv):
        plan = make_plan(steps, SOURCES + 1, self.x.device)
        states = self.states.clone()
        assert len(rows) == sum(step.num_rows for step in steps)
        return op(self.x[rows], *self.rest, states, plan).cpu(), kept_states(states, plan)


class DeltaRule:
    def __init__(self, steps: list[Step], dtype, device, shape=(1, 2, 12, 10)) -> None:
        key_heads, heads, key_dim, value_dim = shape
        torch.manual_seed(key_dim)
        rows, keys = sum(step.num_rows for step in steps), key_heads * key_dim
        mixed = torch.randn(rows, 2 * keys + heads * value_dim).to(device, dtype)
        q, k, v = mixed.split([keys, keys, heads * value_dim], dim=1)
        self.inputs = [
            *(x.unflatten(1, (key_heads, key_dim)) for x in (q, k)),
            v.unflatten(1, (heads, value_dim)),
            -torch.rand(rows, heads, device=device) / 2,
            torch.rand(rows, heads, device=device),
        ]
        self.states = make_states(steps, heads, key_dim, value_dim).to(device)

    def run(self, steps: list[Step], rows: list[int], op=delta_rule_triton.gated_delta_rule):
        plan = make_plan(steps, SOURCES + 1, self.states.device)
        states = self.states.clone()
        inputs = [tensor[rows] for tensor in self.inputs]
        return op(*inputs, states, plan).cpu(), kept_states(states, plan)


@pytest.mark.parametrize(("channels", "taps"), [(1, 4), (7, 1), (600, 3)])
def test_causal_conv_is_the_reference(dtype, device, channels: int, taps: int) -> None:
    steps = random_steps(channels, 3, SOURCES)
    case = Convolution(steps, dtype, device, channels, taps)
    rows = list(range(len(case.x)))
    y, kept = case.run(steps, rows)
    case.x, case.states = case.x.cpu(), case.states.cpu()
    case.rest = [tensor.cpu() for tensor in case.rest]
    expected, expected_kept = case.run(steps, rows, conv_reference.causal_conv)
    assert_near(y, expected, dtype)
    assert_bitwise(kept, expected_kept)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 4, 16, 16), (1, 3, 7, 10), (1, 1, 128, 9)])
def test_gated_delta_rule_is_the_reference(dtype, device, shape) -> None:
    steps = random_steps(shape[2], 3, SOURCES)
    case = DeltaRule(steps, dtype, device, shape)
    rows = list(range(len(case.inputs[0])))
    out, kept = case.run(steps, rows)
    case.inputs, case.states = [tensor.cpu() for tensor in case.inputs], case.states.cpu()
    expected, expected_kept = case.run(steps, rows, delta_rule_reference.gated_delta_rule)
    assert_near(out, expected, dtype)
    assert_near(kept.nan_to_num(7), expected_kept.nan_to_num(7), torch.float32)


@pytest.mark.parametrize("layer", [Convolution, DeltaRule])
def test_rows_do_not_depend_on_the_batch(compared_dtype, device, layer) -> None:
    steps = random_steps(1, 3, SOURCES)
    case = layer(steps, compared_dtype, device)
    rows = list(range(sum(step.num_rows for step in steps)))
    out, kept = case.run(steps, rows)
    for step in reversed(steps):
        rows, own = rows[: -step.num_rows], rows[-step.num_rows :]
        alone, alone_kept = case.run([step], own)
        assert_bitwise(alone, out[own])
        assert_bitwise(alone_kept, kept[own])


@pytest.mark.parametrize("layer", [Convolution, DeltaRule])
def test_a_path_of_a_tree_is_a_run_is_one_by_one(compared_dtype, device, layer) -> None:
    case = layer([TREE], compared_dtype, device)
    out, kept = case.run([TREE], list(range(TREE.num_rows)))
    for chain, rows in zip(CHAINS, PATHS, strict=True):
        chain_out, chain_kept = case.run([chain], rows)
        assert_bitwise(chain_out, out[rows])
        assert_bitwise(chain_kept, kept[rows])
        for before, row in itertools.pairwise(rows[2:]):
            case.states[1] = kept[before].to(case.states)
            row_out, row_kept = case.run([Step(run_len=1, source=1)], [row])
            assert_bitwise(row_out, out[row : row + 1])
            assert_bitwise(row_kept, kept[row : row + 1])


@pytest.mark.parametrize("entries", [0, 1])
def test_padding_comes_out_as_zeros_and_has_no_state(device, entries: int) -> None:
    steps = [Step(run_len=3, source=1)] * entries
    padding = Step(run_len=2)
    plan = make_plan(steps, SOURCES + 1)
    padded = StatePlan(
        q_offsets_B1=plan.q_offsets_B1.to(device),
        sources_B=plan.sources_B.to(device),
        parents_T=torch.cat((plan.parents_T, torch.tensor([-1, -1]).int())).to(device),
        targets_T=torch.cat((plan.targets_T, torch.tensor([0, 0]).int())).to(device),
    )
    conv = Convolution([*steps, padding], torch.float32, device)
    rule = DeltaRule([*steps, padding], torch.float32, device)
    for tensor in (conv.x, *rule.inputs):
        tensor[-2:] = torch.nan
    y = conv_triton.causal_conv(conv.x, *conv.rest, conv.states, padded)
    out = delta_rule_triton.gated_delta_rule(*rule.inputs, rule.states, padded)
    for rows in (y, out):
        assert rows[:-2].isfinite().all()
        assert not rows[-2:].any()
    assert conv.states[0].isnan().all()


@pytest.mark.parametrize("heads", [1, 19])
def test_delta_gates_are_the_reference(dtype, device, heads: int) -> None:
    torch.manual_seed(heads)
    ba = torch.randn(4, 2 * heads + 1) * 4
    ba[0, :2], ba[1, :2] = 60000, -60000
    a, b = ba.to(dtype).split([heads, heads + 1], dim=1)
    arguments = (a, b[:, :heads], torch.rand(heads).mul(16).log(), torch.randn(heads).half())
    on_device = [tensor.to(device) for tensor in arguments]
    for out, expected in zip(
        delta_gates_triton.delta_gates(*on_device),
        delta_gates_reference.delta_gates(*arguments),
        strict=True,
    ):
        assert out.dtype is torch.float32
        torch.testing.assert_close(out.cpu(), expected, rtol=2e-6, atol=1e-30)
    one = delta_gates_triton.delta_gates(on_device[0][2:3], on_device[1][2:3], *on_device[2:])
    assert torch.equal(one[0], delta_gates_triton.delta_gates(*on_device)[0][2:3])


@pytest.mark.parametrize("dim", [1, 24, 128])
def test_gated_norm_and_gate_are_the_references(dtype, device, dim: int) -> None:
    torch.manual_seed(dim)
    x, wide = torch.randn(3, 2, dim).to(dtype) * 3, torch.randn(3, 2, 2 * dim).to(dtype)
    gate, weight = wide[..., dim:], torch.randn(dim).to(dtype)
    arguments = [tensor.to(device) for tensor in (x, gate, weight)]
    out = gated_rms_norm_triton.gated_rms_norm(*arguments, EPS)
    assert_near(out, gated_rms_norm_reference.gated_rms_norm(x, gate, weight, EPS), dtype)
    alone = gated_rms_norm_triton.gated_rms_norm(arguments[0][1:2], arguments[1][1:2], weight.to(device), EPS)  # fmt: skip  # noqa: E501
    assert torch.equal(alone, out[1:2])
    expected, heads = x.clone(), x.to(device, copy=True)
    flat = heads.flatten(1).clone()
    sigmoid_gate_reference.sigmoid_gate_(expected, gate)
    sigmoid_gate_triton.sigmoid_gate_(heads, wide.to(device)[..., dim:])
    sigmoid_gate_triton.sigmoid_gate_(flat, gate.flatten(1).contiguous().to(device))
    assert_near(heads, expected, dtype)
    assert torch.equal(flat.view(x.shape), heads)


@pytest.mark.parametrize("width", [1, 100])
def test_an_offset_of_one_is_the_reference(dtype, device, width: int) -> None:
    torch.manual_seed(width)
    x, residual, weight = (torch.randn(s).to(dtype) for s in ((3, width), (3, width), (width,)))
    out = rms_norm_triton.rms_norm(x.to(device), weight.to(device), EPS, unit_offset=True)
    assert_near(out, rms_norm_reference.rms_norm(x, weight, EPS, unit_offset=True), dtype)
    arguments = [tensor.to(device, copy=True) for tensor in (x, residual, weight)]
    out = rms_norm_triton.add_rms_norm(*arguments, EPS, unit_offset=True)
    assert_near(out, rms_norm_reference.add_rms_norm(x, residual, weight, EPS, True), dtype)
