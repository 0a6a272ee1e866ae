"""An engine behind `specrollout serve`, which TRL's trainers use with ``vllm_mode="server"``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import requests
import torch
from safetensors.torch import save
from torch import nn

from rollout.errors import InvalidInputError, RolloutError
from rollout.trainers.hook import RolloutHook
from rollout.types import FinishReason, RequestStats, Rollout, SamplingParams, TokenExtras

_PROMPTS_OF_CALL = 1024  # `server.max_batch`, by default
_BUCKET_BYTES = 256 << 20
_POLL_SECONDS = 0.5
_REASONS = {"abort": "error"}  # with a status code: what sglang calls one that has failed
_SENT = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "stop", "stop_regex", "stop_token_ids", "ignore_eos",
    "min_new_tokens", "max_new_tokens", "allowed_token_ids", "bad_words", "json_schema", "regex",
    "ebnf",
)  # fmt: skip


class ServerEngine:
    """Requests in sglang's dialect to one server. An update is one transaction there, on all ranks
    of its model. A server with keys needs SPECROLLOUT_ADMIN_KEY in the environment."""

    def __init__(self, url: str, timeout: float) -> None:
        """``timeout``: seconds that the server may take to be up. Raises InvalidInputError where
        none answers by then, or another kind of server does."""
        self._url = url.rstrip("/")
        self._session = requests.Session()
        if key := os.environ.get("SPECROLLOUT_ADMIN_KEY"):
            self._session.headers["Authorization"] = f"Bearer {key}"
        self._wait(timeout)
        try:
            self.max_context_len = int(self._call("GET", "/get_server_info")["context_length"])
        except (RolloutError, KeyError) as error:
            remedy = f"must be that of a `specrollout serve`: {error}"
            raise InvalidInputError("vllm_server_base_url", url, remedy) from error

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._session.get(f"{self._url}/health", timeout=timeout)
                return
            except requests.RequestException as error:
                if time.monotonic() > deadline:
                    remedy = f"nothing answers there in vllm_server_timeout={timeout:g} seconds"
                    raise InvalidInputError("vllm_server_base_url", self._url, remedy) from error
            time.sleep(_POLL_SECONDS)

    @property
    def weight_version(self) -> int:
        return int(self._call("GET", "/get_weight_version")["weight_version"])

    def get_server_info(self) -> dict[str, Any]:
        """The one thing that TRL asks a vLLM server: what is done to logits before logprobs."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        weight_version: int | None = None,
        **options: Any,
    ) -> None:
        """See `rollout.trainers.hook.WeightReceiver`. Raises RolloutError with the server's
        reason."""
        self._call("POST", "/begin_weight_update", {"weight_version": weight_version, **options})
        try:
            for bucket in _copied(named_tensors, _BUCKET_BYTES):
                self._send(bucket)
        except BaseException as error:
            with suppress(RolloutError):  # it is gone: the first error says more
                reason = {"reason": f"the trainer failed: {error!r}"}
                self._call("POST", "/abandon_weight_update", reason)
            raise
        self._call("POST", "/end_weight_update", {})

    def _send(self, bucket: dict[str, torch.Tensor]) -> None:
        self._answer("POST", "/update_weights_from_tensor", data=save(bucket),
                     headers={"Content-Type": "application/octet-stream"})  # fmt: skip

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Rollout]:
        """One rollout for each prompt, by its own request seed."""
        rollouts: list[Rollout] = []
        for first in range(0, len(prompts), _PROMPTS_OF_CALL):
            part = slice(first, first + _PROMPTS_OF_CALL)
            rollouts += self._generated(prompts[part], params, seeds[part])
        return rollouts

    def _generated(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Rollout]:
        sampling = {name: getattr(params, name) for name in _SENT}
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": [sampling | {"request_seed": seed} for seed in seeds],
            "return_logprob": True,
            "top_logprobs_num": params.top_logprobs,
        }
        answers = self._call("POST", "/generate", body)
        return [_rollout(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._answer(method, path, json=body).json()

    def _answer(self, method: str, path: str, **content: Any) -> requests.Response:
        """Raises RolloutError for any answer but a good one, with the server's reason."""
        try:
            answer = self._session.request(method, f"{self._url}{path}", **content)
        except requests.RequestException as error:
            raise RolloutError(f"the server at {self._url} cannot be reached: {error}") from error
        if answer.status_code != requests.codes.ok:
            raise RolloutError(f"{self._url}{path}: {answer.status_code}: {answer.text[:1000]}")
        return answer


def _copied(
    named_tensors: Iterable[tuple[str, torch.Tensor]], num_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Copies on the CPU, by name, about ``num_bytes`` of them at a time."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > num_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if bucket:
        yield bucket


def _rollout(prompt: Sequence[int], answer: dict[str, Any]) -> Rollout:
    """Raises RolloutError for a request that was aborted."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    if reason["type"] == "abort" and "status_code" not in reason:
        raise RolloutError(f"the server has aborted a request: {reason['message']}")
    tops = meta.get("output_top_logprobs", [])
    return Rollout(
        request_id=0,
        prompt_index=0,
        sample_index=0,
        seed=meta["request_seed"],
        prompt_ids=list(prompt),
        token_ids=answer["output_ids"],
        logprobs=[logprob for logprob, *_ in meta["output_token_logprobs"]],
        weight_versions=[
            int(span["version"])
            for span in meta["weight_versions"]
            for _ in range(span["start"], span["end"])
        ],
        finish_reason=FinishReason(_REASONS.get(reason["type"], reason["type"])),
        matched_stop=reason.get("matched"),
        text=answer["text"],
        extras=TokenExtras(
            top_logprobs=[[(token, logprob) for logprob, token, *_ in top] for top in tops]
        ),
        stats=RequestStats(
            verify_steps=meta["spec_verify_ct"],
            drafted=meta["spec_draft_token_num"],
            accepted=meta["spec_accept_token_num"],
        ),
        error=reason.get("message"),
    )


class ServerGeneration:
    """One server for all processes of a trainer. Each asks it for its own samples; the first brings
    the weights."""

    def __init__(
        self,
        engine: ServerEngine,
        model: nn.Module,
        accelerator: Any,
        *,
        adapters_only: bool = False,
    ) -> None:
        self.engine = engine
        self._model = model
        self._accelerator = accelerator
        self._adapters_only = adapters_only
        self._hook: RolloutHook | None = None

    def sync(self) -> None:
        """Take the model's weights. A collective: every process of the trainer calls it."""
        is_first = self._accelerator.is_main_process
        if self._hook is None:
            engine = self.engine if is_first else None
            self._hook = RolloutHook(engine, self._model, adapters_only=self._adapters_only)
        if is_first or self._hook.source.ranks.groups:
            self._hook.sync()
        self._accelerator.wait_for_everyone()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        *,
        samples_per_prompt: int,
    ) -> list[Rollout]:
        """See `ColocatedEngine.generate`; a process may call it without the others."""
        return self.engine.generate(prompts, params, seeds)
