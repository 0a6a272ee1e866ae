"""Request seeds that no timing can change."""

from __future__ import annotations

import hashlib
from collections import Counter

from rollout.sampling.noise import derive_seed


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
