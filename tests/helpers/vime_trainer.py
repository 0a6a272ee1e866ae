"""What vime, vLLM's RL trainer, asks of an engine, call by call in the order of its training."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.held_engine import held
from tests.server.conftest import Live
from tests.server.policies import PROMPT, SAMPLING, SEED, Policy


class VimeTrainer:
    """``engine``: a client of an engine; ``router``: of what stands before it, for rollouts."""

    def __init__(self, engine: httpx.Client, router: httpx.Client) -> None:
        self._engine = engine
        self._router = router

    def start(self) -> dict[str, Any]:
        """The engine's parallel sizes."""
        info = self._engine.get("/server_info", params={"config_format": "json"}).json()
        assert self._engine.get("/health").status_code == 200
        assert self._engine.get("/is_sleeping").json() == {"is_sleeping": False}
        return info["vllm_config"]["parallel_config"]

    def rollout(self, token_ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """The whole answer to one prompt."""
        body = {
            "model": self._router.get("/v1/models").json()["data"][0]["id"],
            "token_ids": list(token_ids),
            "sampling_params": {
                "temperature": 0.9, "top_p": 1.0, "top_k": -1, "logprobs": 1, "stop": None,
                "include_stop_str_in_output": True, "stop_token_ids": None,
                "skip_special_tokens": False, **sampling,
            },
        }  # fmt: skip
        answer = self._router.post("/inference/v1/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def abort_all(self) -> None:
        """End what runs, and wait until nothing does."""
        assert self._engine.post("/abort_requests", json={}).status_code == 200
        wait_until(lambda: self._num_requests() == 0)

    def _num_requests(self) -> int:
        query = {"include_inflight": "true", "inflight_limit": 100}
        load = self._engine.get("/load", params=query).json()
        return max(load.get(name, 0) for name in ("server_load", "num_requests", "num_reqs"))

    def update_from_disk(self, folder: Path) -> None:
        self._post("/pause", mode="keep", clear_cache="false")
        self._post("/reset_prefix_cache", reset_running_requests="false", reset_external="false")
        kwargs = {"weights_path": str(folder), "is_checkpoint_format": True}
        body = {"method": "reload_weights", "kwargs": kwargs}
        assert self._post("/collective_rpc", body) == {"results": [None]}
        self._post("/resume")

    def sleep(self, level: int) -> None:
        self._post("/sleep", level=level)
        assert self._engine.get("/is_sleeping").json() == {"is_sleeping": True}

    def wake_up(self, *tags: str) -> None:
        answer = self._engine.post("/wake_up", params=[("tags", tag) for tag in tags])
        assert answer.status_code == 200, answer.text

    def join_nccl(self) -> httpx.Response:
        place = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
        return self._engine.post("/init_weight_transfer_engine", json={"init_info": place})

    def _post(self, path: str, body: Any = None, **query: Any) -> Any:
        answer = self._engine.post(path, json=body, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()


def train(live: Live, router: httpx.Client, profiles: Path, policies: Sequence[Policy]) -> None:
    """Two steps, each of which ends with other weights: a rollout that is cut and resumed, sleep,
    weights from a folder. The server has the last policy and writes profiles to a folder."""
    with live.client() as engine:
        trainer = VimeTrainer(engine, router)
        assert set(trainer.start().values()) == {1}
        assert "init_info.backend" in trainer.join_nccl().json()["error"]["message"]
        assert engine.post("/start_profile", json={}).status_code == 200
        in_use = policies[-1]
        for new in policies:
            assert _sampled(trainer) == in_use.output_ids
            _cut_and_resume(live, trainer)
            trainer.sleep(level=0)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(_sampled, trainer)
                wait_until(lambda: live.serving.num_unfinished == 1)
                trainer.wake_up("scheduling")
                assert waiting.result(HANG_SECONDS) == in_use.output_ids
            trainer.sleep(level=1)
            trainer.wake_up("weights", "kv_cache")
            assert _sampled(trainer) == in_use.output_ids
            trainer.sleep(level=2)
            trainer.wake_up("weights")
            trainer.update_from_disk(new.folder)
            trainer.wake_up("kv_cache")
            assert _sampled(trainer) == new.output_ids
            in_use = new
        assert engine.post("/stop_profile").status_code == 200
        (trace,) = profiles.iterdir()
        assert "aten::" in trace.read_text()
        assert engine.post("/stop_profile").status_code == 400


def _sampled(trainer: VimeTrainer) -> list[int]:
    ids, _, reason = read(trainer.rollout(PROMPT, max_tokens=SAMPLING["max_new_tokens"], **_FREE))
    assert reason == "length"
    return ids


_FREE: dict[str, Any] = {"seed": SEED, "ignore_eos": True}


def _cut_and_resume(live: Live, trainer: VimeTrainer) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held(live.serving.loop):
            running = pool.submit(trainer.rollout, PROMPT, max_tokens=400, **_FREE)
            wait_until(lambda: live.serving.num_unfinished == 1)
            trainer.abort_all()
        ids, _, reason = read(running.result(HANG_SECONDS))
    assert (reason, len(ids) < 400) == ("abort", True)
    rest, _, reason = read(trainer.rollout([*PROMPT, *ids], max_tokens=20, **_FREE))
    assert (reason, len(rest)) == ("length", 20)


def read(answer: dict[str, Any]) -> tuple[list[int], list[float], str]:
    """The tokens of an answer, their logprobs and its finish reason, as vime reads them."""
    (choice,) = answer["choices"]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert len(logprobs) == len(choice["token_ids"])
    assert answer["usage"]["completion_tokens"] == len(logprobs)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    spec = answer["request_spec_decode_stats"]
    assert spec["num_accepted_draft_tokens"] <= spec["num_draft_tokens"]
    assert spec["num_spec_steps"] + spec["num_accepted_draft_tokens"] >= len(logprobs)
    return choice["token_ids"], logprobs, choice["finish_reason"]
