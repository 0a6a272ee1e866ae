"""`/pull_weights`: a local checkpoint is brought to a version that slime's trainer has published.

Nothing of the engine changes: `/update_weights_from_disk` with the same folder comes after it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastapi import APIRouter

from rollout.errors import RolloutError
from rollout.server.allowed_paths import AllowedPaths
from rollout.server.body_fields import CHANGED, Body
from rollout.server.json_route import JsonAnswer, JsonRoute
from rollout.server.serving import Serving
from rollout.server.sglang.control import RefusedError, success
from rollout.server.sglang.weight_bodies import Version
from rollout.weights.local_checkpoint import LocalCheckpoint


class PullBody(Body):
    """``source_dir`` holds published versions, ``local_checkpoint_dir`` is to hold this one."""

    local_checkpoint_dir: str
    source_dir: str
    target_version: Version


class Puller:
    """Brings local checkpoints below server.weights_root to published versions, one at a time."""

    def __init__(self, serving: Serving) -> None:
        configured = serving.config.weights_root
        self._root = AllowedPaths("server.weights_root", [] if configured is None else [configured])
        self._base = Path(serving.model_path)
        # A pull waits for others: in asyncio's own threads a few of them would hold up all calls.
        self._one_at_a_time = ThreadPoolExecutor(1, "pull")

    async def pull(self, folder: str, field: str, source: str, version: int) -> JsonAnswer:
        """Bring ``folder`` to a version in ``source``, which ``field`` named."""

        def pull() -> None:
            root = self._root
            path = root.new_folder("local_checkpoint_dir", folder)
            if path.exists():
                root.folder("local_checkpoint_dir", folder)
            LocalCheckpoint(
                path, self._base, root.folder(field, source),
                lambda published: root.folder(field, str(published)),
            ).pull(version)  # fmt: skip

        try:
            await asyncio.get_running_loop().run_in_executor(self._one_at_a_time, pull)
        except (RolloutError, OSError) as error:
            return RefusedError(error).response
        return success("Success.")


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["weights"], route_class=JsonRoute)
    puller = Puller(serving)

    @router.post("/pull_weights", responses=CHANGED)
    async def pull_weights(body: PullBody) -> JsonAnswer:
        """Bring a folder below server.weights_root to a published version; generation goes on."""
        return await puller.pull(
            body.local_checkpoint_dir, "source_dir", body.source_dir, body.target_version
        )

    return router
