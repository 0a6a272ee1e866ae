"""Pausing an engine, releasing its memory, and the reason why it cannot run."""

from __future__ import annotations

from collections.abc import Iterable

from rollout.engine.step_runner import StepRunner
from rollout.engine.worker import Worker
from rollout.errors import EngineStateError
from rollout.runner.memory_saver import ReleaseMemory, ResumeMemory
from rollout.types import MemoryTag, PauseMode
from rollout.validation import checked_flag, checked_iterable, checked_member
from rollout.weights.shared_memory import HandleReceiver


class Lifecycle:
    """Pauses generation and releases memory, and knows why nothing can run meanwhile.

    Args:
        handles: the senders' memory that is let go of with the engine's own.
    """

    def __init__(self, worker: Worker, steps: StepRunner, handles: HandleReceiver) -> None:
        self.is_paused = False
        self._worker = worker
        self._steps = steps
        self._handles = handles

    def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT) -> None:
        mode = checked_member(mode, "mode", PauseMode)
        if mode is PauseMode.ABORT:
            self._steps.abort_all()
        elif mode is PauseMode.RETRACT:
            self._steps.retract_all()
        self.is_paused = True

    def continue_generation(self) -> None:
        self.is_paused = False

    def release_memory(
        self, tags: Iterable[MemoryTag | str] = ("kv_cache", "weights"), keep_weights: bool = True
    ) -> dict[str, int]:
        wanted = memory_tags(tags)
        keep_weights = checked_flag(keep_weights, "keep_weights")
        memory_saver = self._worker.memory_saver
        memory_saver.require_held(wanted)
        if MemoryTag.KV_CACHE in wanted:
            self._steps.drop_kv(retract=True, abort=False)
        self._handles.release()
        with self._worker.ranks.sharing(ReleaseMemory(wanted, keep_weights)):
            freed = memory_saver.release(wanted, keep_weights)
        return {tag.value: num_bytes for tag, num_bytes in freed.items()}

    def resume_memory(self, tags: Iterable[MemoryTag | str] | None = None) -> None:
        saver = self._worker.memory_saver
        released = [tag for tag in MemoryTag if tag in saver.released]
        wanted = released if tags is None else memory_tags(tags)
        saver.require_released(wanted)
        with self._worker.ranks.sharing(ResumeMemory(wanted)):
            saver.resume(wanted)

    @property
    def unavailable_reason(self) -> str:
        if self.is_paused:
            return "generation is paused: call continue_generation()"
        if self._worker.memory_saver.unavailable_reason:
            return self._worker.memory_saver.unavailable_reason
        weights = self._worker.weights
        if weights.is_under_way and not weights.serves:
            return "a weight update is under way: call end_weight_update() when all of it has come"
        return self.torn_reason

    @property
    def torn_reason(self) -> str:
        weights = self._worker.weights
        return "" if weights.serves else f"the weights are torn: {weights.reason}"

    def require_running(self) -> None:
        """Raises EngineStateError while paused or without memory, WeightUpdateError while weights
        are not whole."""
        if not self._worker.memory_saver.unavailable_reason:
            self._worker.weights.require_whole()
        if reason := self.unavailable_reason:
            raise EngineStateError(reason)


def memory_tags(tags: Iterable[MemoryTag | str]) -> list[MemoryTag]:
    """The named tags, each once. Raises InvalidInputError."""
    noun = f"some of {', '.join(MemoryTag)}"
    found = [checked_member(tag, "tags", MemoryTag) for tag in checked_iterable(tags, "tags", noun)]
    return list(dict.fromkeys(found))
