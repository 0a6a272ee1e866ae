"""`/collective_rpc`: the methods of workers that SkyRL and vime call. There are no others."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import Field, ValidationError

from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError
from rollout.server.body_fields import Body
from rollout.server.json_route import JsonAnswer, JsonRoute, request_error
from rollout.server.serving import Serving
from rollout.server.sglang.control import Answer, change, success
from rollout.server.sglang.weights import weights_root
from rollout.server.vllm.control import WakeFields, release_awake, resume_asleep
from rollout.server.vllm.weight_bodies import require_checkpoint_names
from rollout.weights.disk_source import DiskSource


class RpcBody(Body):
    """A method of vLLM's workers."""

    method: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = None  # the call's own counts


class SyncSleepFields(Body):
    offload_kv: bool = True  # unread: requests compute their KV anew, bit for bit


class ReloadFields(Body):
    weights_path: str | None = None  # default: the model's own folder
    is_checkpoint_format: bool = True


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["vllm"], route_class=JsonRoute)

    root = weights_root(serving)

    async def call(body: RpcBody) -> JsonAnswer:
        if body.args:
            raise InvalidInputError("args", body.args, "the calls have keyword arguments alone")
        match body.method:
            case "skyrl_sleep_for_weight_sync":
                SyncSleepFields.model_validate(body.kwargs)

                def sleep(engine: Engine) -> Answer:
                    tags = ["weights", "kv_cache"]
                    return {"freed_bytes": release_awake(engine, tags, keep_weights=False)}

                return await change(serving, sleep)
            case "skyrl_wake_for_weight_sync":
                tags = WakeFields.model_validate(body.kwargs).tags

                def wake(engine: Engine) -> Answer:
                    resume_asleep(engine, tags)
                    return {}

                return await change(serving, wake)
            case "reload_weights":
                fields = ReloadFields.model_validate(body.kwargs)

                def reload(engine: Engine) -> Answer:
                    require_checkpoint_names(fields.is_checkpoint_format)
                    path = fields.weights_path or serving.model_path
                    source = DiskSource(root.folder("weights_path", path))
                    return serving.open_update.load(engine, source, {})

                return await change(serving, reload)
            case "skyrl_discard_in_memory_lora":
                return success()  # none is ever kept beside the weights
            case "skyrl_set_lora_receive_target":
                raise InvalidInputError(
                    "method", body.method, "adapters come in a folder: set lora.sync_mode=disk"
                )
        raise InvalidInputError(
            "method", body.method,
            "must be reload_weights, skyrl_sleep_for_weight_sync, skyrl_wake_for_weight_sync or "
            "skyrl_discard_in_memory_lora",
        )  # fmt: skip

    @router.post("/collective_rpc")
    async def collective_rpc(body: RpcBody) -> JsonAnswer:
        """Weights from a folder; sleep and wake around an update, as SkyRL's client has them."""
        try:
            answer = await call(body)
        except ValidationError as error:
            raise request_error(error, "kwargs") from None
        return JsonAnswer({"results": [None]}) if answer.status_code == 200 else answer

    return router
