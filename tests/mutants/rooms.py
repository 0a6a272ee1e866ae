"""The sources that are mutated."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.mutation import Mutation, mutations_of

ROOMS: dict[str, tuple[str, ...]] = {
    "engine": ("rollout/engine/*.py", "rollout/runner/memory_saver.py"),
    "scheduler": ("rollout/scheduler/*.py",),
    "memory": ("rollout/memory/*.py",),
    "sampling": ("rollout/sampling/*.py",),
    "workers": (
        "spec_workers/*.py",
        "spec_workers/target/*.py",
        "spec_workers/step/*.py",
        "spec_workers/hybrid/*.py",
    ),
    "budget": ("spec_workers/budget/*.py",),
    "neural drafts": ("spec_workers/neural/*.py",),
    "features": ("spec_workers/features/*.py",),
    "draft training": ("spec_workers/draft_training/*.py",),
    "corpus": ("ngram_native/*.py", "ngram_native/csrc/*.cpp", "ngram_native/csrc/*.h"),
}
"""Globs below the root by the name of the room."""


def all_mutations(root: Path) -> list[Mutation]:
    return [
        mutation
        for room, globs in ROOMS.items()
        for path in sorted({path for glob in globs for path in root.glob(glob)})
        for mutation in mutations_of(root, path, room)
    ]
