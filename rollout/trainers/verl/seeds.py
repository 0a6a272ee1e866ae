"""Which request seed a prompt gets, and how a rollout that was cut gets its own again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from rollout.sampling.noise import derive_seed

_KEPT_STEPS = 8  # trainer steps of which samples are counted; replicas are at most one apart


@dataclass(frozen=True, slots=True)
class RequestStart:
    """How a request begins."""

    seed: int  # the request seed
    prompt_len: int  # so many tokens are the prompt; what follows was generated before a cut


class RequestSeeds:
    """Gives every sample its seed; one for all replicas of a run.

    verl names a request anew at each call, also where it resubmits one that was aborted, so seeds
    go by content. A sample's seed derives from (run seed, trainer step, prompt, how many samples of
    that prompt began in that step): the samples of a prompt are the same set whichever replica
    makes which, and however many replicas there are. A request that was cut comes back as prompt
    plus partial; those very tokens find its seed, so it goes on as if it had never been cut. Where
    several were cut with the same tokens, whoever comes first takes the first: they cannot be told
    apart.
    """

    def __init__(self, run_seed: int, max_cut: int = 65536) -> None:
        """``max_cut``: so many cut requests are remembered; older ones go on under a new seed."""
        self._run_seed = run_seed
        self._max_cut = max_cut
        self._begun: dict[int, Counter[int]] = {}  # trainer step -> prompt key -> samples
        self._cut: OrderedDict[int, list[RequestStart]] = OrderedDict()
        self._num_cut = 0

    def start(self, key: int, num_tokens: int, step: int) -> RequestStart:
        """For a request of ``num_tokens`` tokens.

        ``key``: of those tokens, `rollout.engine.tokenizer.prompt_group`. ``step``: the trainer
        step of the weights the request begins under.
        """
        if waiting := self._cut.get(key):
            start = waiting.pop(0)
            self._num_cut -= 1
            if not waiting:
                del self._cut[key]
            return start
        step = max(step, max(self._begun, default=step) - _KEPT_STEPS + 1)
        if step not in self._begun:
            self._begun[step] = Counter()
            for old in [kept for kept in self._begun if kept <= step - _KEPT_STEPS]:
                del self._begun[old]
        sample = self._begun[step][key]
        self._begun[step][key] += 1
        prompt_seed = derive_seed(self._run_seed, step, key)
        return RequestStart(derive_seed(prompt_seed, sample, 0), num_tokens)

    def cut(self, key: int, start: RequestStart) -> None:
        """A request that began with ``start`` ended early; ``key`` is of all its tokens."""
        self._cut.setdefault(key, []).append(start)
        self._num_cut += 1
        while self._num_cut > self._max_cut:
            _, oldest = self._cut.popitem(last=False)
            self._num_cut -= len(oldest)
