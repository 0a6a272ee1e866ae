"""Steps of a rank that has no requests, while others in lockstep with it have some.

Nothing is made up for them: a batch of no entries gives no rows everywhere, of the widths and
dtypes the models have. Features come from the forward of the target that keeps them, hidden states
from the draft's roots. Each forward is entered all the same, with padding rows that write to the
null slot.
"""

from __future__ import annotations

from rollout.types import Batch
from spec_workers.worker import SpecWorker


def check_idle(worker: SpecWorker) -> None:
    """Run a step of no requests, before the first real one.

    A network or kernel that cannot take that fails here, on its own, and not in the middle of a run
    while other ranks wait for it in the same forward.
    """
    worker.step(Batch(step=0, entries=[]))
