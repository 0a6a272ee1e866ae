"""Events that meet the requests of a parity row while they run, and that no rollout may show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from rollout import Rollout, RolloutEngine, SamplingParams
from rollout.errors import OutOfMemoryError
from rollout.types import Request
from tests.helpers.parity_models import prompts


@dataclass(frozen=True)
class Case:
    """An engine, and what each of its rollouts must be."""

    engine: RolloutEngine
    wanted: dict[tuple[int, int], Rollout]  # by prompt and sample
    params: list[SamplingParams]  # of each prompt
    own_weights: dict[str, torch.Tensor]

    def submit(self, key: tuple[int, int], cut: int = 0) -> Request:
        prompt, sample = key
        partial = self.wanted[key].token_ids[:cut]
        return self.engine.submit(
            prompts()[prompt], self.params[prompt],
            prompt_index=prompt, sample_index=sample, partial_ids=partial,
        )  # fmt: skip

    def run(self, between: Callable[[int], None] = lambda step: None) -> Iterator[Rollout]:
        """Steps until nothing is left. One that raises is run again."""
        steps = 0
        while self.engine.has_unfinished:
            try:
                ended = self.engine.step()
            except HiccupError:
                self.engine.check_integrity()
                continue
            yield from ended
            steps += 1
            between(steps)

    def check(self, rollout: Rollout, cut: int = 0) -> None:
        """``cut``: tokens of it that were there before."""
        wanted = self.wanted[rollout.prompt_index, rollout.sample_index]
        assert numbers(rollout) == numbers(wanted, cut)
        if self.params[rollout.prompt_index].routed_experts:
            assert np.array_equal(rollout.routed_experts, wanted.routed_experts)

    def check_all(self, rollouts: list[Rollout]) -> list[Rollout]:
        assert len(rollouts) == len(self.wanted)
        for rollout in rollouts:
            self.check(rollout)
        return rollouts


class HiccupError(RuntimeError):
    """A step that fails."""


def numbers(rollout: Rollout, cut: int = 0) -> tuple:
    extras = rollout.extras.since(cut)
    return rollout.token_ids[cut:], rollout.logprobs[cut:], extras, rollout.finish_reason


def generated(case: Case) -> list[Rollout]:
    if all(params == case.params[0] for params in case.params):
        return case.check_all(case.engine.generate(prompts(), case.params[0]))
    for key in case.wanted:
        case.submit(key)
    return case.check_all(list(case.run()))


def generated_again(case: Case) -> list[Rollout]:
    """Generate again, with prompts in the prefix cache and a corpus that knows every answer."""
    generated(case)
    return generated(case)


def disturbed(case: Case) -> list[Rollout]:
    """Generate with calls between steps, while some requests are amid their prompts or answers."""
    engine = case.engine

    def score_one() -> None:
        with suppress(OutOfMemoryError):  # running requests may need all that there is
            engine.score(prompts()[3], [5, 6, 7])

    acts = [
        lambda: engine.pause_generation("in_place"),
        score_one,
        lambda: engine.pause_generation("retract"),
        lambda: engine.status(),
        lambda: (engine.release_memory(), engine.resume_memory()),
        score_one,
        lambda: engine.flush_cache(),
    ]

    def between(step: int) -> None:
        if step % 3 == 0 and step <= 3 * len(acts):
            acts[step // 3 - 1]()
            engine.continue_generation()
            engine.check_integrity()

    for key in case.wanted:
        case.submit(key)
    rollouts = case.check_all(list(case.run(between)))
    for key, rollout in case.wanted.items():
        scored = engine.score(rollout.prompt_ids, rollout.token_ids, case.params[key[0]])
        assert scored == rollout.logprobs
    return rollouts


def cut_and_resubmitted(case: Case) -> list[Rollout]:
    """Resubmit prompts with the first part of their answers: they go on as if never cut."""
    cuts = {}
    for number, (key, rollout) in enumerate(case.wanted.items()):
        last = len(rollout.token_ids) - 1
        cuts[key] = (last // 2, min(1, last), last)[number % 3]
        case.submit(key, cuts[key])
    rollouts = list(case.run())
    assert len(rollouts) == len(cuts)
    for rollout in rollouts:
        case.check(rollout, cuts[rollout.prompt_index, rollout.sample_index])
    return rollouts


def failing(case: Case) -> list[Rollout]:
    """Steps that fail behind the forward, behind the commit and at their end can be run again; and
    requests that are aborted have the beginning of what they would have become."""
    worker, random = case.engine.worker, np.random.default_rng(4)
    verify, observe, failed = worker.target.verify, worker.observe, []

    def perhaps() -> None:
        if random.random() < 0.15:
            failed.append(1)
            raise HiccupError

    def verify_perhaps(batch, trees):
        forwarded = verify(batch, trees)
        perhaps()
        return forwarded

    def observe_perhaps(step):
        perhaps()
        observe(step)
        perhaps()

    worker.target.verify, worker.observe = verify_perhaps, observe_perhaps
    requests = [case.submit(key) for key in case.wanted]

    def between(step: int) -> None:
        if step in (2, 6):
            unfinished = [each for each in requests if case.engine.scheduler.has(each.request_id)]
            if unfinished:
                case.engine.abort(unfinished[int(random.integers(len(unfinished)))].request_id)
            case.engine.check_integrity()

    rollouts = list(case.run(between))
    assert len(rollouts) == len(requests)
    assert failed
    aborted = [rollout for rollout in rollouts if rollout.finish_reason == "abort"]
    assert 0 < len(aborted) < len(rollouts)
    for rollout in rollouts:
        if rollout.finish_reason != "abort":
            case.check(rollout)
    for rollout in aborted:
        wanted = case.wanted[rollout.prompt_index, rollout.sample_index]
        count = len(rollout.token_ids)
        assert rollout.token_ids == wanted.token_ids[:count]
        assert rollout.logprobs == wanted.logprobs[:count]
    return rollouts


def updated(case: Case) -> list[Rollout]:
    """Nothing that other weights gave is met after an update: KV, states, drafts."""
    engine = case.engine
    other = {name: weight * 1.25 for name, weight in case.own_weights.items()}
    keys = list(case.wanted)[-2:]
    for keeps_kv in (False, True):
        engine.update_weights_from_tensor(list(other.items()), selector="target")
        version = engine.weight_versions["target"]
        requests = [case.submit(key) for key in keys]
        while min(len(request.token_ids) for request in requests) < 3 and engine.has_unfinished:
            engine.step()
        engine.update_weights_from_tensor(
            list(case.own_weights.items()), selector="target", flush_cache=not keeps_kv
        )
        for rollout in list(case.run()):
            old = rollout.weight_versions.count(version)
            new = len(rollout.token_ids) - old
            assert rollout.weight_versions == [version] * old + [version + 1] * new
            if new and not keeps_kv:
                check_goes_on(case, rollout, old)
    return generated(case)


def check_goes_on(case: Case, rollout: Rollout, old: int) -> None:
    """The rollout goes on as one that was cut where the weights changed."""
    case.engine.submit(
        rollout.prompt_ids, case.params[rollout.prompt_index],
        request_seed=rollout.seed, partial_ids=rollout.token_ids[:old],
        prompt_index=rollout.prompt_index, sample_index=rollout.sample_index,
    )  # fmt: skip
    [again] = case.run()
    assert numbers(again) == numbers(rollout, old)


EVENTS = {
    "none": generated,
    "again": generated_again,
    "disturbed": disturbed,
    "cut": cut_and_resubmitted,
    "failing": failing,
    "updated": updated,
}
