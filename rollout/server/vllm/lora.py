"""`/load_lora_adapter`: a LoRA adapter that PEFT has saved, put into the weights.

One at a time is served. Under its name, for while it is loaded the base has no weights to answer.
"""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from rollout.engine.protocol import Engine
from rollout.server.body_fields import CHANGED, Body
from rollout.server.json_route import JsonAnswer, JsonRoute
from rollout.server.serving import Serving
from rollout.server.sglang.control import Answer, change
from rollout.server.sglang.weights import weights_root
from rollout.weights.adapter_folder import is_adapter_folder


class LoadBody(Body):
    """``lora_path``: a folder of PEFT's below server.weights_root."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # unread: one adapter always takes the place of another


class UnloadBody(Body):
    lora_name: str
    lora_int_id: int | None = None  # unread: adapters have names


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["vllm"], route_class=JsonRoute)
    root = weights_root(serving)
    update = serving.open_update

    @router.post("/load_lora_adapter", responses=CHANGED)
    @router.post("/v1/load_lora_adapter", responses=CHANGED)
    @router.post("/skyrl/v1/load_lora_adapter", responses=CHANGED)
    async def load_lora_adapter(body: LoadBody) -> JsonAnswer:
        """Serve with this adapter. Requests in flight recompute their KV."""

        def load(engine: Engine) -> Answer:
            folder = root.new_folder("lora_path", body.lora_path)
            if not is_adapter_folder(folder):  # clients ask again: a disk may be behind
                raise HTTPException(404, f"lora_path={body.lora_path!r}: no adapter is there")
            folder = root.folder("lora_path", body.lora_path)
            update.load_adapter(engine, body.lora_name, folder)
            return {"message": f"LoRA adapter {body.lora_name!r} is loaded"}

        return await change(serving, load)

    @router.post("/unload_lora_adapter", responses=CHANGED)
    @router.post("/v1/unload_lora_adapter", responses=CHANGED)
    async def unload_lora_adapter(body: UnloadBody) -> JsonAnswer:
        """Serve the base again."""

        def unload(engine: Engine) -> Answer:
            if body.lora_name != update.adapter_name:
                raise HTTPException(404, f"lora_name={body.lora_name!r}: is not loaded")
            update.unload_adapter(engine)
            return {"message": f"LoRA adapter {body.lora_name!r} is unloaded"}

        return await change(serving, unload)

    return router
