"""A rank that runs what rank 0 runs: forwards, weights and memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch

from rollout.engine.lifecycle import memory_tags
from rollout.errors import ParallelError, RolloutError
from rollout.models.causal_lm import CausalLM
from rollout.models.target_vocabulary import ComputeLogits, EmbedTokens
from rollout.ops import gpu
from rollout.parallel import ModelRanks, RankGroup
from rollout.runner.memory_saver import MemorySaver, ReleaseMemory, ResumeMemory
from rollout.runner.model_runner import ModelRunner, RunForward
from rollout.types import MemoryTag, Prompt, Rollout, SamplingParams
from rollout.weights.manifest import Manifest
from rollout.weights.rank_messages import TakeWeights, WeightMessage
from rollout.weights.receiver import WeightReceiver
from rollout.weights.source import WeightSource
from rollout.weights.transaction import WeightTransaction
from rollout.weights.update_calls import UpdateCalls
from rollout.weights.update_counts import UpdateCounts

log = logging.getLogger(__name__)

T = TypeVar("T")


class RankModels(Protocol):
    @property
    def ranks(self) -> ModelRanks: ...
    @property
    def model(self) -> CausalLM: ...
    @property
    def model_device(self) -> torch.device: ...
    @property
    def runner(self) -> ModelRunner: ...
    @property
    def weights(self) -> WeightTransaction: ...
    @property
    def memory_saver(self) -> MemorySaver: ...


class FollowingRank(UpdateCalls):
    """One of several ranks that run the same rows, and not the first.

    It schedules, drafts and samples nothing. While rank 0 leads it is in `follow`. In a program
    whose ranks all make the same calls it has those below: the ones that generate follow rank 0 to
    the end of its call and return what that does; weights and memory are each rank's own.
    """

    def __init__(self, models: object) -> None:
        """Follows until rank 0's engine is made. ``models``: a `RankModels`."""
        self._models = own = cast(RankModels, models)
        self.receiver = WeightReceiver(own.weights, own.model_device, own.ranks.all)
        self.follow()

    def follow(self) -> Any:
        """Run what rank 0 tells until the call, or the `RolloutEngine.leading`, that it is in has
        ended, or its engine is closed; the result of the call.

        Raises EngineStateError where that call failed, ParallelError where a rank is lost.
        """
        with torch.inference_mode(), gpu.on(self._models.model_device):
            return self._models.ranks.follow(self._run)

    def _run(self, message: object) -> None:
        models = self._models
        match message:
            case RunForward(step, features):
                models.runner.run(step, lambda logits_RV: None, features)  # rank 0 samples
            case EmbedTokens() | ComputeLogits():
                message.run(models.model)
            case TakeWeights() | WeightMessage():
                self._run_weights(message)
            case ReleaseMemory(tags, keep_weights):
                self.receiver.handles.release()
                models.memory_saver.release(tags, keep_weights)
            case ResumeMemory(tags):
                models.memory_saver.resume(tags)
            case _:
                raise TypeError(f"rank 0 told {message!r}")

    def _run_weights(self, message: TakeWeights | WeightMessage) -> None:
        try:
            if isinstance(message, TakeWeights):
                message.run(self.receiver, self._models.ranks.tensor)
            else:
                message.run(self.receiver)
        except ParallelError:
            raise
        except (RolloutError, OSError, TimeoutError) as error:  # rank 0 has it as well
            log.debug("%s: %s", type(message).__name__, error)

    def led(self, call: Callable[[], T]) -> T:
        """Follow the same call of rank 0's; what that returns. The call is not made here."""
        return cast(T, self.follow())

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Rollout]:
        return self.follow()

    def score(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams | None = None,
    ) -> list[float]:
        return self.follow()[0]

    def release_memory(
        self, tags: Collection[MemoryTag | str] = ("kv_cache", "weights"), keep_weights: bool = True
    ) -> dict[str, int]:
        wanted = memory_tags(tags)
        self.receiver.handles.release()
        freed = self._models.memory_saver.release(wanted, keep_weights)
        return {tag.value: num_bytes for tag, num_bytes in freed.items()}

    def resume_memory(self, tags: Collection[MemoryTag | str] | None = None) -> None:
        saver = self._models.memory_saver
        released = [tag for tag in MemoryTag if tag in saver.released]
        saver.resume(released if tags is None else memory_tags(tags))

    @property
    def tensor_ranks(self) -> RankGroup:
        return self._models.ranks.tensor

    @property
    def max_context_len(self) -> int:
        return self._models.model.spec.max_context_len

    @property
    def released_tags(self) -> frozenset[MemoryTag]:
        return self._models.memory_saver.released

    @property
    def weight_version(self) -> int:
        return self._models.weights.version

    def update_weights(self, source: WeightSource, /, **options: Any) -> UpdateCounts | None:
        return self.receiver.update(source, options)

    def begin_weight_update(self, /, manifest: Manifest | None = None, **options: Any) -> None:
        self.receiver.begin(manifest, options)

    def end_weight_update(self, weight_version: int | None = None) -> UpdateCounts:
        return self.receiver.end(weight_version)

    def abandon_weight_update(self, reason: str = "abandoned by the caller") -> None:
        self.receiver.abandon(reason)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "gloo",
        timeout: float = 300.0,
    ) -> None:
        self.receiver.init_group(
            master_address, master_port, rank_offset, world_size, group_name, backend, timeout
        )  # fmt: skip

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        self.receiver.destroy_group(group_name)

    def weights_digest(self, selector: str = "all") -> str:
        return self._models.weights.digest(selector)

    def close(self) -> None:
        """Leave the other ranks, none of which can run any more."""
        self.receiver.close()
        self._models.ranks.close()
