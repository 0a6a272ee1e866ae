"""Brings a local checkpoint to a version that SkyRL's trainer has published.

Nothing of the engine changes: `/update_weights` with that version comes after it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollout.errors import RolloutError
from rollout.server.allowed_paths import AllowedPaths
from rollout.server.json_route import JsonAnswer
from rollout.server.serving import Serving
from rollout.server.sglang.control import RefusedError, success
from rollout.weights.local_checkpoint import LocalCheckpoint


class Puller:
    """Brings local checkpoints below server.weights_root to published versions, one at a time."""

    def __init__(self, serving: Serving) -> None:
        configured = serving.config.weights_root
        self._root = AllowedPaths("server.weights_root", [] if configured is None else [configured])
        self._base = Path(serving.model_path)
        # A pull waits for others: in asyncio's own threads a few of them would hold up all calls.
        self._one_at_a_time = ThreadPoolExecutor(1, "pull")

    async def pull(self, folder: str, source: str, version: int) -> JsonAnswer:
        """Bring ``folder`` to a version in ``source``."""

        def pull() -> None:
            root = self._root
            path = root.new_folder("local_checkpoint_dir", folder)
            if path.exists():
                root.folder("local_checkpoint_dir", folder)
            LocalCheckpoint(
                path, self._base, root.folder("sync_dir", source),
                lambda published: root.folder("sync_dir", str(published)),
            ).pull(version)  # fmt: skip

        try:
            await asyncio.get_running_loop().run_in_executor(self._one_at_a_time, pull)
        except (RolloutError, OSError) as error:
            return RefusedError(error).response
        return success("Success.")
