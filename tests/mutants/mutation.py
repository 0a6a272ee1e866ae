"""The small changes that can be made to the sources, each of one file."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.cpp_mutations import cpp_edits
from tests.mutants.edit import Edit
from tests.mutants.python_mutations import python_edits


@dataclass(frozen=True, slots=True)
class Mutation:
    """An edit of a file, named so that it is found again when other lines have moved.

    Its name is the line's text, which of the lines of that text it is, the operator, and which of
    the operator's edits of that line it is.
    """

    room: str
    file: str  # below the root, as POSIX writes it
    source: str  # the line, without space around it
    occurrence: int
    edit: Edit
    variant: int

    @property
    def key(self) -> tuple[str, str, int, str, int]:
        return self.file, self.source, self.occurrence, self.edit.operator, self.variant

    @property
    def is_native(self) -> bool:
        return not self.file.endswith(".py")

    def applied_to(self, content: bytes) -> bytes:
        return content[: self.edit.start] + self.edit.replacement + content[self.edit.end :]

    def diff(self, content: bytes) -> str:
        before, after = (text.decode().splitlines() for text in (content, self.applied_to(content)))
        lines = difflib.unified_diff(before, after, n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def mutations_of(root: Path, path: Path, room: str) -> list[Mutation]:
    """All of one file, in the order of its text."""
    content = path.read_bytes()
    edits = python_edits(content) if path.suffix == ".py" else cpp_edits(content)
    lines = [line.strip() for line in content.decode().splitlines()]
    variants: defaultdict[tuple[int, str], int] = defaultdict(int)
    found = []
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end, edit.operator)):
        source = lines[edit.line - 1]
        found.append(
            Mutation(
                room,
                path.relative_to(root).as_posix(),
                source,
                lines[: edit.line - 1].count(source),
                edit,
                variants[edit.line, edit.operator],
            )
        )
        variants[edit.line, edit.operator] += 1
    return found


def by_line(mutations: Iterable[Mutation]) -> list[list[Mutation]]:
    """Mutations grouped by line, so that a line with many is drawn no more often."""
    lines: dict[tuple[str, int], list[Mutation]] = {}
    for mutation in mutations:
        lines.setdefault((mutation.file, mutation.edit.line), []).append(mutation)
    return list(lines.values())


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
