"""OpenRLHF's executors, which turn a prompt into a trajectory, and the engine calls of a sample."""

from __future__ import annotations

import hashlib
import importlib.util
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rollout.errors import InvalidInputError
from rollout.sampling.seeds import derive_seed
from rollout.trainers.openrlhf.sampling import RequestOutput
from rollout.types import Rollout

Generate = Callable[[Sequence[int], Any, int], Awaitable[tuple[RequestOutput, Rollout]]]


class Sample:
    """Seeds each call of one sample, and counts what they took."""

    def __init__(self, generate: Generate, seed: int) -> None:
        """``generate(prompt_token_ids, sampling_params, request_seed)``."""
        self._generate = generate
        self._seed = seed
        self._calls = 0
        self._verify_steps = 0
        self._accepted = 0
        self._weight_versions: list[int] = []

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Any,
        multi_modal_data: object = None,
    ) -> RequestOutput:
        """One continuation. Raises InvalidInputError for images, RolloutError where none came."""
        if multi_modal_data:
            raise InvalidInputError("multi_modal_data", multi_modal_data, "is not implemented")
        own = getattr(sampling_params, "seed", None)
        seed = derive_seed(self._seed if own is None else own, 0, self._calls)
        self._calls += 1
        output, rollout = await self._generate(prompt_token_ids, sampling_params, seed)
        self._verify_steps += rollout.stats.verify_steps
        self._accepted += rollout.stats.accepted
        self._weight_versions += rollout.weight_versions
        return output

    def metrics(self) -> dict[str, float]:
        """The numbers for OpenRLHF's ``extra_logs``, which its trainer averages over samples."""
        steps, versions = self._verify_steps, self._weight_versions
        return {
            "specrollout/accept_length": (steps + self._accepted) / steps if steps else 0.0,
            "specrollout/weight_version_min": float(min(versions, default=0)),
            "specrollout/weight_version_max": float(max(versions, default=0)),
        }


class SampleSeeds:
    """Each sample's seed is a function of the engine's seed, the prompt, how often this engine was
    asked for that prompt before, and the sample's index. So the same run gives the same rollouts
    whatever finishes first, and an epoch does not repeat the noise of the one before. What was
    asked is forgotten when the process ends: a run that is resumed has seeds of its own.
    """

    def __init__(self, engine_seed: int, resumed_from: str = "") -> None:
        """``resumed_from``: the tag of the checkpoint that the run goes on from, if any."""
        self._run_seed = derive_seed(engine_seed, _key(resumed_from), 0)
        self._asked: Counter[int] = Counter()

    def next_samples(self, prompt: str) -> int:
        """A seed for the samples of one more call with this prompt."""
        key = _key(prompt)
        seed = derive_seed(self._run_seed, key, self._asked[key])
        self._asked[key] += 1
        return seed


def _key(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def load_executor(agent_path: str | None, reward_endpoints: Sequence[str] | None) -> Any:
    """The ``AgentExecutor`` of a user's file, or OpenRLHF's own of a single turn: an
    `openrlhf.utils.agent.AgentExecutorBase`.

    Raises InvalidInputError for a file without such a class.
    """
    from openrlhf.utils.agent import AgentExecutorBase, SingleTurnAgentExecutor

    if not agent_path:
        return SingleTurnAgentExecutor(reward_endpoints)
    argument = "--train.agent_func_path"
    if Path(agent_path).suffix != ".py":
        raise InvalidInputError(argument, agent_path, "must be a Python file")
    spec = importlib.util.spec_from_file_location("agent_module", agent_path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    executor = getattr(module, "AgentExecutor", None)
    if not (isinstance(executor, type) and issubclass(executor, AgentExecutorBase)):
        raise InvalidInputError(
            argument, agent_path, "must define AgentExecutor, a subclass of AgentExecutorBase"
        )
    return executor()
