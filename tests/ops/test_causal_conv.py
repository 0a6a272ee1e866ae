"""The short convolution against transformers and its reference; states along runs and trees.

States that no row of the plan reads are NaN, and so is the slot of no state.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from rollout.ops.causal_conv import causal_conv, native, reference
from rollout.ops.state_plan import StatePlan
from tests.helpers.state_cases import Step, make_plan, random_steps

SOURCES = 8


def tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype is torch.float32 else torch.finfo(dtype).eps


def make_inputs(
    steps: list[Step], channels: int, taps: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """x inside wider rows, weight, bias, states of which only the sources are numbers."""
    torch.manual_seed(seed)
    rows = sum(step.num_rows for step in steps)
    x = torch.randn(rows, channels + 3).to(dtype)[:, :channels]
    weight, bias = torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype)
    states = torch.full((SOURCES + 1 + rows, channels, taps - 1), torch.nan, dtype=dtype)
    for step in steps:
        states[step.source] = torch.randn(channels, taps - 1).to(dtype)
    states[0] = torch.nan
    return x, weight, bias, states


def run(steps: list[Step], x, weight, bias, states) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the state after every row that keeps one (NaN: it does not)."""
    plan = make_plan(steps, SOURCES + 1)
    before, states = states, states.clone()
    y = causal_conv(x, weight, bias, states, plan)
    kept = torch.full((len(x), *states.shape[1:]), torch.nan, dtype=states.dtype)
    has_target = plan.targets_T > 0
    targets = plan.targets_T[has_target].long()
    kept[has_target] = states[targets]
    states[targets] = before[targets]
    assert_bitwise(states, before)  # nothing else was written
    return y, kept


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def parts(tensor: torch.Tensor, steps: list[Step]) -> list[torch.Tensor]:
    return list(tensor.split([step.num_rows for step in steps]))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("channels", "taps"), [(5, 4), (32, 4), (100, 3), (16, 2), (7, 1)])
def test_a_run_is_that_of_transformers(channels: int, taps: int, biased: bool) -> None:
    x, weight, bias, states = make_inputs([Step(run_len=11)], channels, taps, torch.float32)
    bias = bias if biased else None
    y, _ = run([Step(run_len=11)], x, weight, bias, states)
    expected = theirs.causal_conv1d_fn(x.T[None], weight, bias, activation="silu")[0].T
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    if taps > 1:
        continued = make_inputs([Step(run_len=1, source=3)], channels, taps, torch.float32)
        y, kept = run([Step(run_len=1, source=3)], *continued[:2], bias, continued[3])
        state = continued[3][3:4].clone()
        update = theirs.causal_conv1d_update(
            continued[0].T[None], state, weight * 0 + continued[1], bias, activation="silu"
        )
        torch.testing.assert_close(y, update[0].T, rtol=1e-5, atol=1e-6)
        assert_bitwise(kept, state)


@pytest.mark.parametrize(("channels", "taps"), [(1, 4), (7, 2), (24, 4), (100, 3), (160, 8)])
def test_causal_conv_is_the_reference(dtype: torch.dtype, channels: int, taps: int) -> None:
    steps = random_steps(channels, 5, SOURCES)
    x, weight, bias, states = make_inputs(steps, channels, taps, dtype)
    assert native.supports(x, weight, bias, states)
    y, kept = run(steps, x, weight, bias, states)
    plan = make_plan(steps, SOURCES + 1)
    expected = reference.causal_conv(x, weight, bias, states, plan)
    torch.testing.assert_close(y, expected, rtol=tolerance(dtype), atol=2e-6)
    has_target = plan.targets_T > 0
    assert_bitwise(kept[has_target], states[plan.targets_T[has_target].long()])
    assert kept[~has_target].isnan().all()
    assert y.is_contiguous()


@pytest.mark.parametrize("seed", range(3))
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, seed: int, set_threads) -> None:
    steps = random_steps(seed, 6, SOURCES)
    x, weight, bias, states = make_inputs(steps, 1000, 4, dtype, seed)
    set_threads(2)
    together = zip(*(parts(t, steps) for t in run(steps, x, weight, bias, states)), strict=True)
    set_threads(1)
    for step, rows, (y, kept) in zip(steps, parts(x, steps), together, strict=True):
        alone = run([step], rows.clone(), weight, bias, states)
        assert_bitwise(alone[0], y)
        assert_bitwise(alone[1], kept)


@pytest.mark.parametrize("run_len", [1, 2, 7])
def test_a_path_of_a_tree_is_a_run(dtype: torch.dtype, run_len: int) -> None:
    step = Step(run_len=run_len, nodes=[0, 0, 1, 2, 2, 4, 4, 3], source=2)
    x, weight, bias, states = make_inputs([step], 40, 4, dtype)
    y, kept = run([step], x, weight, bias, states)
    for leaf in (5, 7, 8):
        rows = [*range(run_len), *(step.row_of(node) for node in step.path(leaf))]
        chain = Step(run_len=len(rows), source=2, checkpoints=list(range(run_len - 1, len(rows))))
        chain_y, chain_kept = run([chain], x[rows], weight, bias, states)
        assert_bitwise(chain_y, y[rows])
        assert_bitwise(chain_kept, kept[rows])


def test_one_by_one_is_the_run(dtype: torch.dtype) -> None:
    step = Step(run_len=9, checkpoints=list(range(9)))
    x, weight, bias, states = make_inputs([step], 40, 4, dtype)
    y, kept = run([step], x, weight, bias, states)
    for row in range(1, 9):
        states[1] = kept[row - 1]
        row_y, row_kept = run([Step(run_len=1, source=1)], x[row : row + 1], weight, bias, states)
        assert_bitwise(row_y, y[row : row + 1])
        assert_bitwise(row_kept, kept[row : row + 1])


def test_padding_comes_out_as_zeros_and_has_no_state(dtype: torch.dtype) -> None:
    step = Step(run_len=3)
    x, weight, bias, states = make_inputs([step], 24, 4, dtype)
    expected, _ = run([step], x, weight, bias, states)
    plan = make_plan([step], SOURCES + 1)
    more = torch.zeros(2, dtype=torch.int32)
    padded = StatePlan(
        q_offsets_B1=plan.q_offsets_B1,
        sources_B=plan.sources_B,
        parents_T=torch.cat((plan.parents_T, more - 1)),
        targets_T=torch.cat((plan.targets_T, more)),
    )
    y = causal_conv(torch.cat((x, x[:2] * torch.nan)), weight, bias, states, padded)
    assert_bitwise(y[:3], expected)
    assert not y[3:].any()


def test_no_rows() -> None:
    plan = make_plan([], 1)
    y = causal_conv(torch.empty(0, 8), torch.ones(8, 4), None, torch.zeros(2, 8, 3), plan)
    assert y.shape == (0, 8)
