"""The corpus's proposer and vLLM's suffix decoding, replaying the same rollouts in vLLM's arrays.

    build/venv-vllm/bin/python benchmarks/vllm_replay.py < rollouts.json

Standard input is ``{"epochs": [[{"prompt": [...], "output": [...]}, ...], ...], "num_tokens": K,
"rows": R}``. Each epoch's requests fill R rows, the last row moving into each that is freed, as
vLLM's do. A draft is accepted as far as it is what was recorded. The answer is one line of JSON:
for each proposer the last epoch's tokens, the rows of its steps and the seconds of its proposals.

Legend: R and L the rows and columns of vLLM's arrays.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@dataclass(eq=False, kw_only=True)
class Replayed:
    """A request whose output is known."""

    name: str
    prompt: list[int]
    output: list[int]
    done: int = 0  # tokens of the output that were emitted

    def emit(self, draft: list[int]) -> list[int]:
        """The accepted tokens of the draft and one more, as vLLM's rejection sampler emits them."""
        begin = self.done
        for position, token in enumerate(self.output[begin:]):
            self.done += 1
            if position >= len(draft) or draft[position] != token:
                break
        return self.output[begin : self.done]


class Rows:
    """The part of vLLM's ``InputBatch`` that proposers read."""

    def __init__(self, size: int, max_len: int) -> None:
        self.requests: list[Replayed] = []
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}
        self.token_ids_cpu = np.zeros((size, max_len), dtype=np.int32)  # [R, L]
        self.num_tokens_no_spec = np.zeros(size, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(size, dtype=np.int32)

    def enter(self, request: Replayed) -> None:
        row = len(self.requests)
        self.requests.append(request)
        self._write(row, 0, request.prompt)
        self.num_prompt_tokens[row] = len(request.prompt)
        self._name()

    def append(self, row: int, tokens: list[int]) -> None:
        self._write(row, int(self.num_tokens_no_spec[row]), tokens)

    def leave(self, row: int) -> None:
        last = len(self.requests) - 1
        self.requests[row] = self.requests[last]
        self.requests.pop()
        for each in (self.token_ids_cpu, self.num_tokens_no_spec, self.num_prompt_tokens):
            each[row] = each[last]
        self._name()

    def _name(self) -> None:
        self.req_ids = [each.name for each in self.requests]
        self.req_id_to_index = {name: row for row, name in enumerate(self.req_ids)}

    def _write(self, row: int, begin: int, tokens: list[int]) -> None:
        end = begin + len(tokens)
        self.token_ids_cpu[row, begin:end] = tokens
        self.num_tokens_no_spec[row] = end


Propose = Callable[[Rows, list[list[int]]], list[list[int]]]


def replay(epochs: list[list[Replayed]], size: int, max_len: int, propose: Propose) -> Any:
    """The last epoch's decoded tokens, decoding rows, steps and seconds of proposals."""
    found = {"tokens": 0, "rows": 0, "steps": 0, "drafted": 0, "seconds": 0.0}
    for epoch in epochs:
        found = dict.fromkeys(found, 0)
        waiting, rows = list(reversed(epoch)), Rows(size, max_len)
        drafts: dict[str, list[int]] = {}
        while waiting or rows.requests:
            while waiting and len(rows.requests) < size:
                rows.enter(waiting.pop())
            sampled: list[list[int]] = []
            for row, request in enumerate(rows.requests):
                is_first, draft = request.done == 0, drafts.get(request.name, [])
                sampled.append(request.emit(draft))
                rows.append(row, sampled[-1])
                if not is_first:  # the first token comes of the prompt's forward
                    found["tokens"] += len(sampled[-1])
                    found["rows"] += 1
                    found["drafted"] += len(draft)
            started = time.perf_counter()
            proposed = propose(rows, sampled)
            found["seconds"] += time.perf_counter() - started
            found["steps"] += 1
            drafts = dict(zip(rows.req_ids, proposed, strict=True))
            for row in reversed(range(len(rows.requests))):
                if rows.requests[row].done == len(rows.requests[row].output):
                    rows.leave(row)
    return found


def config_of(num_tokens: int, rows: int, max_len: int, vocab_size: int) -> Any:
    """The part of vLLM's configuration that the two read; its own defaults for suffix decoding."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=num_tokens, suffix_decoding_max_tree_depth=24,
            suffix_decoding_max_cached_requests=10000, suffix_decoding_max_spec_factor=1.0,
            suffix_decoding_min_token_prob=0.1,
        ),
        model_config=SimpleNamespace(
            max_model_len=max_len, get_vocab_size=lambda: vocab_size, tokenizer="/",
            enforce_eager=True,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        additional_config={"specrollout": {"budget": "fixed"}},
    )  # fmt: skip


def corpus_of(config: Any) -> Propose:
    from spec_workers.vllm import NgramProposer

    proposer = NgramProposer(config)
    return lambda rows, sampled: proposer.propose(
        sampled, rows.num_tokens_no_spec, rows.token_ids_cpu
    )


def suffix_of(config: Any) -> Propose:
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    proposer = SuffixDecodingProposer(config)
    num_tokens = config.speculative_config.num_speculative_tokens
    return lambda rows, sampled: proposer.propose(num_tokens, rows, sampled)


def main() -> None:
    asked = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    recorded = asked["epochs"]
    every = [each for epoch in recorded for each in epoch]
    max_len = max(len(each["prompt"]) + len(each["output"]) for each in every) + 1
    vocab_size = 1 + max(max(each["prompt"] + each["output"]) for each in every)
    config = config_of(asked["num_tokens"], asked["rows"], max_len, vocab_size)
    found: dict[str, Any] = {}
    for name, make in {"corpus": corpus_of, "suffix": suffix_of}.items():
        try:
            propose = make(config)
        except ImportError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
            continue
        epochs = [
            [Replayed(name=f"{e}-{k}", **each) for k, each in enumerate(epoch)]
            for e, epoch in enumerate(recorded)
        ]
        found[name] = replay(epochs, asked["rows"], max_len, propose)
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
