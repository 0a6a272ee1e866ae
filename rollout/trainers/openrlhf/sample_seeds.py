"""Request seeds that no timing can change."""

from __future__ import annotations

import hashlib
from collections import Counter

from rollout.sampling.noise import derive_seed


class SampleSeeds:
    """Each sample's seed is a function of the engine's seed, the prompt, how often this engine was
    asked for that prompt before, and the sample's index. So the same run gives the same rollouts
    whatever finishes first, and an epoch does not repeat the noise of the one before.
    """

    def __init__(self, engine_seed: int) -> None:
        self._engine_seed = engine_seed
        self._asked: Counter[int] = Counter()

    def next_samples(self, prompt: str) -> int:
        """A seed for the samples of one more call with this prompt."""
        digest = hashlib.blake2b(prompt.encode(errors="surrogatepass"), digest_size=8).digest()
        key = int.from_bytes(digest, "little") >> 1
        seed = derive_seed(self._engine_seed, key, self._asked[key])
        self._asked[key] += 1
        return seed
