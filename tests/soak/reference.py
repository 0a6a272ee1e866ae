"""Rollouts of engines that nobody disturbs, and the comparison with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollout import Rollout, RolloutEngine
from tests.soak.asks import Ask
from tests.soak.ledger import Event, Ledger
from tests.soak.policies import History, Moment

_MAX_KEPT = 20_000  # rollouts
Answer = dict[str, Any]
_Key = tuple[Ask, int, int, int, tuple[int, ...]]


class References:
    """One plain engine for each policy, on a thread of its own."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._engines = [
            RolloutEngine.from_pretrained(
                folder, spec="none", num_threads=1, max_kv_tokens=2048, max_running=4
            )
            for folder in folders
        ]
        self.digests = [engine.weights_digest() for engine in self._engines]
        self._known: dict[_Key, Rollout] = {}

    @property
    def vocab_size(self) -> int:
        return self._engines[0].vocab_size

    async def continued(
        self, ask: Ask, policy: int, indices: tuple[int, int], done: Sequence[int]
    ) -> Rollout:
        """The rollout after ``done``. ``indices``: of prompt and sample in their call."""
        key = (ask, policy, *indices, tuple(done))
        if key not in self._known:
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            loop = asyncio.get_running_loop()
            self._known[key] = await loop.run_in_executor(self._thread, self._generate, *key)
        return self._known[key]

    async def scores(self, policy: int, ids: Sequence[int]) -> list[float]:
        """Logprobs of every token but the first, at temperature 1."""
        loop = asyncio.get_running_loop()
        score = self._engines[policy].score
        return await loop.run_in_executor(self._thread, score, [ids[0]], list(ids[1:]))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        for engine in self._engines:
            engine.close()

    def _generate(
        self, ask: Ask, policy: int, prompt_index: int, sample_index: int, done: tuple[int, ...]
    ) -> Rollout:
        engine = self._engines[policy]
        engine.submit(
            ask.prompt,
            ask.params,
            prompt_index=prompt_index,
            sample_index=sample_index,
            partial_ids=done,
        )
        while True:
            for rollout in engine.step():
                return rollout


class Checker:
    """Compares the server's answers with the references."""

    def __init__(self, ledger: Ledger, history: History, references: References) -> None:
        self._ledger, self._history, self._references = ledger, history, references

    async def rollout(
        self,
        event: Event,
        ask: Ask,
        answer: Answer,
        sent: Moment,
        *,
        indices: tuple[int, int] = (0, 0),
        done: Sequence[int] = (),
        aborted_itself: bool = False,
    ) -> None:
        """Tokens, logprobs and the end of one answer of `/generate`.

        ``done``: output that came with the prompt, of a rollout that was cut.
        """
        ledger, meta, ids = self._ledger, answer["meta_info"], answer["output_ids"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        reason = (meta["finish_reason"] or {}).get("type")
        ledger.count("rollouts", f"finish {reason}")
        may_be_aborted = aborted_itself or self._history.may_be_aborted(sent)
        ends = {"stop", "length"} | ({"abort"} if may_be_aborted else set())
        ledger.require(reason in ends, event, f"ask {ask.number} ended by {meta['finish_reason']}")
        spans = [(int(s["version"]), s["start"], s["end"]) for s in meta["weight_versions"]]
        ends_at = [0, *(end for _, _, end in spans)]
        ledger.require(
            ends_at[:-1] == [start for _, start, _ in spans]
            and ends_at[-1] == len(ids) == len(logprobs),
            event,
            f"spans {spans} of {len(ids)} tokens, {len(logprobs)} logprobs",
        )
        for version, start, end in spans:
            if version not in self._history.installed:
                ledger.require(False, event, f"weight version {version} was never sent")
                continue
            if not self._history.is_exact(version, sent):
                ledger.count("rollouts", "tokens after an update in place", end - start)
                continue
            policy = self._history.installed[version].policy
            before = [*done, *ids[:start]]
            expected = await self._references.continued(ask, policy, indices, before)
            ledger.count("rollouts", "tokens compared", end - start)
            found = (ids[start:end], logprobs[start:end])
            known = (expected.token_ids[: end - start], expected.logprobs[: end - start])
            where = f"ask {ask.number}, version {version} (policy {policy}), tokens {start}:{end}"
            ledger.require(
                found == known, event, f"{where} after {before}: {found}, undisturbed {known}"
            )
            if end == len(ids) and reason != "abort":
                whole = (len(expected.token_ids), expected.finish_reason.value)
                ledger.require(
                    (end - start, reason) == whole, event, f"{where}: {reason}, expected {whole}"
                )

    async def completion(self, event: Event, ask: Ask, choice: Answer, sent: Moment) -> None:
        """A choice of `/v1/completions`, where one version made it all."""
        reason = choice["finish_reason"]
        if not self._history.is_stable_since(sent) or self._history.may_be_aborted(sent):
            self._ledger.count("rollouts", "completions not compared")
            return
        policy = self._history.installed[sent.version].policy
        expected = await self._references.continued(ask, policy, (0, 0), ())
        found = (choice["token_ids"], choice["logprobs"]["token_logprobs"], reason)
        known = (expected.token_ids, expected.logprobs, expected.finish_reason.value)
        self._ledger.count("rollouts", "tokens compared", len(found[0]))
        self._ledger.require(
            found == known, event, f"ask {ask.number}: {found}, undisturbed {known}"
        )

    async def score(
        self, event: Event, ids: Sequence[int], logprobs: Sequence[float], sent: Moment
    ) -> None:
        """Logprobs of a prompt's tokens from its second on."""
        if not self._history.is_stable_since(sent):
            self._ledger.count("rollouts", "scores not compared")
            return
        expected = await self._references.scores(self._history.installed[sent.version].policy, ids)
        self._ledger.count("rollouts", "tokens scored", len(expected))
        self._ledger.require(
            list(logprobs) == expected, event, f"{ids}: {logprobs}, undisturbed {expected}"
        )
