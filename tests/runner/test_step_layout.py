"""The padding of a step's recurrent states; that rows are laid out rightly is shown by parity."""

from __future__ import annotations

import numpy as np

from rollout.runner.step_states import state_inputs
from rollout.types import Batch, Scheduled, ScheduledStates
from tests.helpers.requests import make_request, make_trees


def test_rows_of_padding_continue_no_state_and_leave_none() -> None:
    none = np.empty(0, dtype=np.int32)
    states = ScheduledStates(source=4, run_end=6, nodes=none, checkpoints={9: 5})
    request = make_request(list(range(20)))
    entry = Scheduled(request=request, start=7, run_len=3, draft_slots=none, states=states)
    offsets_B1 = np.array([0, 3, 3], dtype=np.int32)
    batch = Batch(step=0, entries=[entry])
    found = state_inputs(batch, make_trees([([], [])]), offsets_B1, rows=5)
    assert found.sources_B.tolist() == [4, 0]
    assert found.parents_T.tolist() == [-1, 0, 1, -1, -1]
    assert found.targets_T.tolist() == [0, 5, 6, 0, 0]
