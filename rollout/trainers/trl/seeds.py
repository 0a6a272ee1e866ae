"""Which request seed each sample of a run gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.sampling.noise import derive_seed


@dataclass(slots=True)
class TrlSampleSeeds:
    """Seeds of a run's samples.

    A seed derives from the run seed, train or eval, the global step, how many batches that step
    has had, and the sample's place in the batch of all processes. So it is the same for one process
    and for many, and for a run that was resumed; and no two samples of a step share one.
    """

    run_seed: int
    process_index: int
    _round: tuple[bool, int] = (True, -1)
    _batches: int = 0  # of this round
    _strides: dict[bool, int] = field(default_factory=dict)

    def next_batch(
        self, size: int, samples_per_prompt: int, *, step: int, training: bool
    ) -> list[int]:
        """Seeds for the next ``size`` samples of this process, each in [0, 2**64).

        The samples of one prompt follow one another, ``samples_per_prompt`` of them, and may go on
        in the next process: TRL's order.
        """
        if (training, step) != self._round:
            self._round, self._batches = (training, step), 0
        round_seed = derive_seed(self.run_seed, step, 2 * self._batches + (not training))
        self._batches += 1
        # Every process has as many samples in a whole batch. Later turns of a conversation are
        # fewer, not the same number everywhere, and must not meet another process's seeds.
        stride = max(self._strides.get(training, 0), size)
        self._strides[training] = stride
        first = self.process_index * stride
        return [
            derive_seed(round_seed, *divmod(first + place, samples_per_prompt))
            for place in range(size)
        ]
