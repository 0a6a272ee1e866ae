"""Puts this engine where TRL's trainers make their vLLM one. The one place that changes TRL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import Trainer
from trl.generation import vllm_generation

from rollout.trainers.trl.generation import SpecGeneration


@contextmanager
def specrollout_generation(
    spec: str = "ngram",
    *,
    spec_options: dict[str, Any] | None = None,
    model_path: str | None = None,
    cluster: str = "none",
    cluster_options: dict[str, Any] | None = None,
    adapters_only: bool = False,
    **overrides: Any,
) -> Iterator[None]:
    """Trainers made inside, with ``use_vllm=True``, generate with this engine::

        with specrollout_generation("ngram"):
            trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, ...))
        trainer.train()

    The options are those of `open_pretrained`; they go over what the trainer's args say.
    ``model_path`` is needed only for a model that was not loaded from a folder or the hub. The
    engine is the trainer's ``vllm_generation.engine``; of a cluster (``cluster="ray",
    cluster_options={"replicas": 4}``), ``close`` it in the end. ``adapters_only``: as for
    `RolloutHook`.

    TRL has no extension point here: the name ``VLLMGeneration`` is exchanged in its loaded modules
    (GRPO, RLOO, distillation and the experimental trainers that use it), and put back on leaving.
    Not for two threads at once, nor inside another.
    """
    original = vllm_generation.VLLMGeneration
    ours = partial(
        SpecGeneration,
        spec=spec,
        spec_options=spec_options,
        model_path=model_path,
        cluster=cluster,
        cluster_options=cluster_options,
        adapters_only=adapters_only,
        overrides=overrides,
    )
    _exchange(original, ours)
    Trainer.vllm_generation = _Owned()
    try:
        yield
    finally:
        del Trainer.vllm_generation
        _exchange(ours, original)  # in modules imported meanwhile too


class _Owned:
    """The attribute in which trainers keep their generation: it tells that whose it is."""

    def __set__(self, trainer: Trainer, generation: SpecGeneration) -> None:
        vars(trainer)["vllm_generation"] = generation
        generation.trainer = trainer


def _exchange(present: object, wanted: object) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("trl.") and vars(module).get("VLLMGeneration") is present:
            module.VLLMGeneration = wanted  # type: ignore[attr-defined]
