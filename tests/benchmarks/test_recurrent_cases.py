"""The cases of recurrent layers run, on a CPU and small."""

from __future__ import annotations

import torch
from recurrent_cases import Shape, make_plan, recurrent_cases

TINY = Shape(
    key_heads=1, heads=2, key_dim=8, value_dim=16, taps=4,
    decodes=(1, 3), tree=(2, 6), prefills=((2, 5), (1, 300)),
)  # fmt: skip


def test_every_case_runs() -> None:
    torch.manual_seed(0)
    names = []
    for case in recurrent_cases(TINY, device="cpu"):
        names.append(case.name)
        assert case.num_bytes > 0
        for call in (*case.ours[:1], *case.theirs[:1]):
            call()
    assert "gated_delta_rule tree 2x(1+6)" in names
    assert [name for name in names if "in chunks" in name] == [
        "gated_delta_rule run 1x300 in chunks"
    ]
    assert len(names) == len(set(names)) == 17


def test_states_are_read_and_kept_in_slots_of_their_own() -> None:
    plan = make_plan(2, 3, nodes=4)
    assert plan.parents_T[:7].tolist() == [-1, 0, 1, 2, 2, 3, 3]
    assert plan.parents_T[7:].tolist() == [-1, 7, 8, 9, 9, 10, 10]
    assert plan.sources_B.tolist() == [1, 2]
    assert plan.targets_T.tolist() == [0, 0, 3, 4, 5, 6, 7, 0, 0, 8, 9, 10, 11, 12]
