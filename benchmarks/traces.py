"""Recorded rollouts to replay, from a file or made up.

Shape legend: P prompts, R responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SYNTHETIC = "synthetic"
"""The name of a trace that was made up."""

SYNTHETIC_VOCABULARY = 30_000


@dataclass(kw_only=True, slots=True)
class Trace:
    name: str
    prompts: list[NDArray[np.int32]]
    responses: list[NDArray[np.int32]]
    prompt_of_R: NDArray[np.int64]
    epoch_of_R: NDArray[np.int64]
    temperature_of_R: NDArray[np.float64]  # NaN where the file does not say
    steps: list[list[int]]  # responses of one RL step, in the order they were started

    @property
    def num_tokens(self) -> int:
        """Of the responses."""
        return sum(map(len, self.responses))


def load_trace(path: Path) -> Trace:
    """Read an `.npz` of recorded rollouts.

    Its arrays: `prompt_tokens` and `resp_tokens`, flat, cut by the offsets `prompt_off` (P + 1,)
    and `resp_off` (R + 1,); `resp_prompt` (R,), an index into the prompts; `resp_step` (R,), the
    rollouts of one step having run together. Optional: `resp_epoch` (R,), one epoch without it;
    `temperature`, a scalar or (R,).
    """
    with np.load(path) as arrays:
        step_of_R = arrays["resp_step"]
        count = len(step_of_R)
        epochs = arrays.get("resp_epoch", np.zeros(count))
        temperature = arrays.get("temperature", np.nan)
        return Trace(
            name=path.stem,
            prompts=np.split(arrays["prompt_tokens"].astype(np.int32), arrays["prompt_off"][1:-1]),
            responses=np.split(arrays["resp_tokens"].astype(np.int32), arrays["resp_off"][1:-1]),
            prompt_of_R=arrays["resp_prompt"].astype(np.int64),
            epoch_of_R=epochs.astype(np.int64),
            temperature_of_R=np.broadcast_to(np.asarray(temperature, np.float64), (count,)),
            steps=[np.flatnonzero(step_of_R == step).tolist() for step in np.unique(step_of_R)],
        )


def synthetic_trace(seed: int = 0) -> Trace:
    """8 samples each of 8 prompts, over 4 epochs: each response is a path through phrases of its
    prompt, with a phrase of its own now and then."""
    rng = np.random.default_rng(seed)
    end = SYNTHETIC_VOCABULARY
    phrases = [[rng.integers(0, end, rng.integers(3, 20)) for _ in range(24)] for _ in range(8)]
    responses: list[NDArray[np.int32]] = []
    for _ in range(4):
        for own in phrases:
            for _ in range(8):
                at, parts = 4, []
                for _ in range(rng.integers(5, 40)):
                    novel = rng.random() < 0.1
                    parts.append(rng.integers(0, end, 6) if novel else own[at])
                    at = (at + 1 if rng.random() < 0.8 else int(rng.integers(24))) % 24
                responses.append(np.concatenate(parts).astype(np.int32))
    return Trace(
        name=SYNTHETIC,
        prompts=[np.concatenate(own[:4]).astype(np.int32) for own in phrases],
        responses=responses,
        prompt_of_R=np.tile(np.repeat(np.arange(8), 8), 4),
        epoch_of_R=np.repeat(np.arange(4), 64),
        temperature_of_R=np.full(len(responses), np.nan),
        steps=[list(range(64 * epoch, 64 * epoch + 64)) for epoch in range(4)],
    )


def load_traces(paths: list[Path], seed: int = 0) -> list[Trace]:
    """The traces of the files; a made-up one when there are none."""
    try:
        return [load_trace(path) for path in paths] or [synthetic_trace(seed)]
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(f"--trace: {error}; must be an .npz as load_trace describes") from error
