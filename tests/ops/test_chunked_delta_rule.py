"""Long runs in chunks are the recurrence, but for rounding."""

from __future__ import annotations

import pytest
import torch

from rollout.ops.gated_delta_rule import gated_delta_rule
from rollout.ops.gated_delta_rule.chunked import (
    CHUNK,
    MIN_ROWS,
    ChunkedPlan,
    chunked_plan,
    torch_kernel,
)
from rollout.ops.gated_delta_rule.fla import agrees, chunked_kernel
from tests.helpers.state_cases import Step, make_plan

CPU = torch.device("cpu")
SHAPES = ((2, 24), (2, 24), (4, 40))  # of q, k and v
LONG = MIN_ROWS + CHUNK


@pytest.mark.parametrize(
    "steps",
    [
        [Step(run_len=MIN_ROWS, source=1)],
        [Step(run_len=LONG + 5, source=1, checkpoints=[99, 120, LONG + 3])],
        [Step(run_len=3, source=1), Step(run_len=LONG, nodes=[0, 0, 1, 2]), Step(run_len=1)],
        [Step(run_len=LONG - 1, nodes=list(range(8))), Step(run_len=2 * LONG, checkpoints=[LONG])],
        [Step(run_len=LONG, source=n, checkpoints=[CHUNK * n]) for n in (1, 2, 3)],
    ],
)
def test_chunks_are_the_recurrence(dtype: torch.dtype, steps: list[Step]) -> None:
    torch.manual_seed(0)
    plan = make_plan(steps, 10)
    chunks = chunked_plan(plan, CPU, torch_kernel)
    assert chunks is not None
    rows = len(plan.parents_T)
    qkv = [torch.randn(rows, *shape).to(dtype) for shape in SHAPES]
    gates = [-torch.rand(rows, 4) / 4, torch.rand(rows, 4)]
    states = torch.full((10 + rows, 4, 24, 40), torch.nan)
    states[1:4] = torch.randn(3, 4, 24, 40)
    expected_states = states.clone()
    expected = gated_delta_rule(*qkv, *gates, expected_states, plan)
    out = gated_delta_rule(*qkv, *gates, states, plan, chunks)
    rtol = 1e-4 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=rtol, atol=2e-6)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=2e-5, equal_nan=True)


def test_long_runs_are_cut_at_checkpoints_and_the_rest_is_left_out() -> None:
    def plan_of(*steps: Step) -> ChunkedPlan | None:
        return chunked_plan(make_plan(list(steps), 10), CPU, torch_kernel)

    assert plan_of(Step(run_len=MIN_ROWS - 1), Step(run_len=1, nodes=list(range(63)))) is None
    plan = plan_of(
        Step(run_len=LONG, nodes=list(range(70)), checkpoints=[LONG - 2]), Step(run_len=2)
    )
    assert plan is not None
    assert [part.lengths_R for part in plan.rounds] == [[LONG - 1]]
    assert plan.rest_rows.tolist() == list(range(LONG - 1, LONG + 70 + 2))
    assert plan.rest.q_offsets_B1.tolist() == [0, 71, 73]
    assert plan.rest.sources_B[0] == plan.rounds[0].targets_R[0]

    # A round takes one piece of each run.
    plan = plan_of(Step(run_len=LONG, checkpoints=[70, 90]), Step(run_len=2), Step(run_len=LONG))
    assert plan is not None
    assert [part.lengths_R for part in plan.rounds] == [[LONG, 71], [20], [LONG - 91]]
    assert plan.rounds[0].sources_R.tolist() == [0, 0]
    assert plan.rounds[1].sources_R[0] == plan.rounds[0].targets_R[1]
    assert plan.rest_rows.tolist() == [LONG, LONG + 1]


def test_another_kernel_is_taken_where_it_agrees() -> None:
    states = torch.empty(1, 4, 24, 40)
    assert chunked_kernel(states, torch.bfloat16) is None

    def forgetful(q, k, v, log_decay, beta, part, states):
        return torch_kernel(q, k, v, log_decay * 2, beta, part, states)

    def transposed(*inputs):
        out, states = torch_kernel(*inputs)
        return out, states.transpose(2, 3)

    assert agrees(torch_kernel, states, torch.bfloat16)
    assert not agrees(forgetful, states, torch.bfloat16)
    assert not agrees(transposed, states, torch.bfloat16)
