"""The gated delta rule against transformers and its reference; states along runs and trees.

States that no row of the plan reads are NaN, and so is the slot of no state.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from rollout.ops.causal_conv import causal_conv
from rollout.ops.gated_delta_rule import gated_delta_rule, native, reference
from rollout.ops.state_plan import StatePlan
from tests.helpers.state_cases import Step, make_plan, random_steps

SOURCES = 8
SHAPES = [(1, 1, 1, 1), (2, 2, 16, 16), (2, 4, 24, 40), (1, 3, 7, 100), (1, 2, 128, 128)]


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype is torch.float32 else torch.finfo(dtype).eps


def make_inputs(
    steps: list[Step],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[torch.Tensor]:
    """q, k, v as views into one convolved row, gates, states: only the sources are numbers."""
    key_heads, heads, key_dim, value_dim = shape
    torch.manual_seed(seed)
    rows = sum(step.num_rows for step in steps)
    keys = key_heads * key_dim
    mixed = torch.randn(rows, 2 * keys + heads * value_dim).to(dtype)
    q, k, v = mixed.split([keys, keys, heads * value_dim], dim=1)
    states = torch.full((SOURCES + 1 + rows, heads, key_dim, value_dim), torch.nan)
    for step in steps:
        states[step.source] = torch.randn(heads, key_dim, value_dim)
    states[0] = torch.nan
    return [
        q.unflatten(1, (key_heads, key_dim)),
        k.unflatten(1, (key_heads, key_dim)),
        v.unflatten(1, (heads, value_dim)),
        -torch.rand(rows, heads) * 0.5,
        torch.rand(rows, heads),
        states,
    ]


def run(steps: list[Step], inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the state after every row that keeps one (NaN: it does not)."""
    plan = make_plan(steps, SOURCES + 1)
    before = inputs[-1]
    states = before.clone()
    out = gated_delta_rule(*inputs[:-1], states, plan)
    kept = torch.full((len(out), *states.shape[1:]), torch.nan)
    has_target = plan.targets_T > 0
    targets = plan.targets_T[has_target].long()
    kept[has_target] = states[targets]
    states[targets] = before[targets]
    assert_bitwise(states, before)  # nothing else was written
    return out, kept


def rows_of(inputs: list[torch.Tensor], rows: object) -> list[torch.Tensor]:
    return [*(tensor[rows] for tensor in inputs[:-1]), inputs[-1]]


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("source", [0, 3])
def test_a_run_is_that_of_transformers(shape: tuple[int, int, int, int], source: int) -> None:
    step = Step(run_len=13, source=source)
    inputs = make_inputs([step], shape)
    out, kept = run([step], inputs)
    for function in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):
        expected, state = function(
            *(tensor.unsqueeze(0) for tensor in inputs[:-1]),
            initial_state=inputs[-1][source : source + 1] if source else None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kept[-1], state[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_gated_delta_rule_is_the_reference(dtype: torch.dtype, shape) -> None:
    steps = random_steps(shape[2], 4, SOURCES)
    inputs = make_inputs(steps, shape, dtype)
    assert native.supports(*inputs)
    out, kept = run(steps, inputs)
    plan = make_plan(steps, SOURCES + 1)
    expected = reference.gated_delta_rule(*inputs, plan)
    torch.testing.assert_close(out, expected, rtol=tolerance(dtype), atol=2e-6)
    has_target = plan.targets_T > 0
    torch.testing.assert_close(
        kept[has_target], inputs[-1][plan.targets_T[has_target].long()], rtol=1e-5, atol=2e-6
    )
    assert out.is_contiguous()


@pytest.mark.parametrize("seed", range(3))
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, seed: int, set_threads) -> None:
    steps = random_steps(seed, 6, SOURCES)
    inputs = make_inputs(steps, (2, 6, 32, 72), dtype, seed)
    set_threads(2)
    out, kept = run(steps, inputs)
    set_threads(1)
    end = 0
    for step in steps:
        rows = range(end, end := end + step.num_rows)
        alone = run([step], rows_of(inputs, list(rows)))
        assert_bitwise(alone[0], out[rows.start : rows.stop])
        assert_bitwise(alone[1], kept[rows.start : rows.stop])


@pytest.mark.parametrize("run_len", [1, 2, 7])
def test_a_path_of_a_tree_is_a_run(dtype: torch.dtype, run_len: int) -> None:
    step = Step(run_len=run_len, nodes=[0, 0, 1, 2, 2, 4, 4, 3], source=2)
    inputs = make_inputs([step], (1, 2, 24, 40), dtype)
    out, kept = run([step], inputs)
    for leaf in (5, 7, 8):
        rows = [*range(run_len), *(step.row_of(node) for node in step.path(leaf))]
        chain = Step(run_len=len(rows), source=2, checkpoints=list(range(run_len - 1, len(rows))))
        chain_out, chain_kept = run([chain], rows_of(inputs, rows))
        assert_bitwise(chain_out, out[rows])
        assert_bitwise(chain_kept, kept[rows])


def test_one_by_one_is_the_run(dtype: torch.dtype) -> None:
    step = Step(run_len=9, checkpoints=list(range(9)))
    inputs = make_inputs([step], (1, 2, 24, 40), dtype)
    out, kept = run([step], inputs)
    for row in range(1, 9):
        inputs[-1][1] = kept[row - 1]
        row_out, row_kept = run([Step(run_len=1, source=1)], rows_of(inputs, [row]))
        assert_bitwise(row_out, out[row : row + 1])
        assert_bitwise(row_kept, kept[row : row + 1])


def test_checkpoints_change_nothing(dtype: torch.dtype) -> None:
    plain, kept = Step(run_len=12, source=1), Step(run_len=12, source=1, checkpoints=[0, 3, 4, 8])
    inputs = make_inputs([plain], (1, 2, 24, 40), dtype)
    assert_bitwise(run([kept], inputs)[0], run([plain], inputs)[0])


def test_padding_comes_out_as_zeros_and_has_no_state(dtype: torch.dtype) -> None:
    step = Step(run_len=3)
    inputs = make_inputs([step], (1, 2, 24, 40), dtype)
    expected, _ = run([step], inputs)
    plan = make_plan([step], SOURCES + 1)
    more = torch.zeros(2, dtype=torch.int32)
    padded = StatePlan(
        q_offsets_B1=plan.q_offsets_B1,
        sources_B=plan.sources_B,
        parents_T=torch.cat((plan.parents_T, more - 1)),
        targets_T=torch.cat((plan.targets_T, more)),
    )
    longer = [torch.cat((tensor, tensor[:2] * torch.nan)) for tensor in inputs[:-1]]
    out = gated_delta_rule(*longer, inputs[-1], padded)
    assert_bitwise(out[:3], expected)
    assert not out[3:].any()


def test_no_rows() -> None:
    inputs = make_inputs([], (1, 2, 8, 8))
    assert gated_delta_rule(*inputs, make_plan([], 1)).shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("field", "row", "value", "error"),
    [
        ("parents_T", 1, 1, "parents_T"),  # itself
        ("parents_T", 4, 2, "parents_T"),  # of another entry
        ("parents_T", 2, 0, "targets_T"),  # further back, and kept nowhere
        ("targets_T", 2, 99, "targets_T"),
        ("sources_B", 1, -1, "sources_B"),
        ("q_offsets_B1", 1, 6, "q_offsets_B1"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(field, row, value, error) -> None:
    steps = [Step(run_len=3), Step(run_len=2)]
    plan = make_plan(steps, 1)
    getattr(plan, field)[row] = value
    with pytest.raises((ValueError, IndexError), match=error):
        gated_delta_rule(*make_inputs(steps, (1, 2, 8, 8)), plan)
    x, states = torch.zeros(5, 8), torch.zeros(6, 8, 3)
    with pytest.raises((ValueError, IndexError), match=error):
        causal_conv(x, torch.ones(8, 4), None, states, plan)
