"""Recorded rollouts to replay, from a file or made up.

Shape legend: P prompts, R responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from harness.command import Command

SYNTHETIC_VOCABULARY = 30_000


@dataclass(kw_only=True, slots=True)
class Trace:
    name: str
    prompts: list[NDArray[np.int32]]
    responses: list[NDArray[np.int32]]
    prompt_of_R: NDArray[np.int64]
    steps: list[list[int]]  # responses of one RL step, in the order they were started

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(map(len, self.responses))

    @property
    def largest_token(self) -> int:
        return max(int(tokens.max(initial=0)) for tokens in (*self.prompts, *self.responses))


def trace_of(
    name: str,
    prompts: Sequence[NDArray],
    responses: Sequence[NDArray],
    prompt_of_R: Sequence[int] | NDArray,
    steps: list[list[int]],
) -> Trace:
    return Trace(
        name=name,
        prompts=[tokens.astype(np.int32) for tokens in prompts],
        responses=[tokens.astype(np.int32) for tokens in responses],
        prompt_of_R=np.asarray(prompt_of_R, np.int64),
        steps=steps,
    )


def load_trace(path: Path) -> Trace:
    """Read an `.npz` of recorded rollouts.

    Its arrays: `prompt_tokens` and `resp_tokens`, flat, cut by the offsets `prompt_off` (P + 1,)
    and `resp_off` (R + 1,); `resp_prompt` (R,), an index into the prompts; `resp_step` (R,), the
    rollouts of one step having run together.

    Raises FileNotFoundError where there is no such file, and where there is another.
    """
    try:
        with np.load(path) as arrays:
            return _from_arrays(path.stem, dict(arrays))
    except (OSError, KeyError, ValueError, TypeError, BadZipFile) as error:
        raise FileNotFoundError(
            f"--trace {path}: {error}; must be an .npz as traces.load_trace describes"
        ) from error


def _from_arrays(name: str, arrays: dict[str, NDArray]) -> Trace:
    step_of_R = arrays["resp_step"]
    return trace_of(
        name,
        np.split(arrays["prompt_tokens"], arrays["prompt_off"][1:-1]),
        np.split(arrays["resp_tokens"], arrays["resp_off"][1:-1]),
        arrays["resp_prompt"],
        [np.flatnonzero(step_of_R == step).tolist() for step in np.unique(step_of_R)],
    )


def synthetic_trace() -> Trace:
    """8 samples each of 8 prompts, over 4 epochs: each response is a path through phrases of its
    prompt, with a phrase of its own now and then."""
    rng = np.random.default_rng(0)
    end = SYNTHETIC_VOCABULARY
    phrases = [[rng.integers(0, end, rng.integers(3, 20)) for _ in range(24)] for _ in range(8)]
    responses: list[NDArray[np.int64]] = []
    for _ in range(4):
        for own in phrases:
            for _ in range(8):
                at, parts = 4, []
                for _ in range(rng.integers(5, 40)):
                    novel = rng.random() < 0.1
                    parts.append(rng.integers(0, end, 6) if novel else own[at])
                    at = (at + 1 if rng.random() < 0.8 else int(rng.integers(24))) % 24
                responses.append(np.concatenate(parts))
    return trace_of(
        "synthetic",
        [np.concatenate(own[:4]) for own in phrases],
        responses,
        np.tile(np.repeat(np.arange(8), 8), 4),
        [list(range(64 * epoch, 64 * epoch + 64)) for epoch in range(4)],
    )


def add_trace_option(command: Command) -> None:
    help = "recorded rollouts, an .npz (repeatable); default: a made-up trace"
    command.option("--trace", [], type=Path, action="append", metavar="FILE", help=help)


def load_traces(paths: Sequence[Path]) -> list[Trace]:
    """The traces of the files; a made-up one when there are none."""
    return [load_trace(path) for path in paths] or [synthetic_trace()]
