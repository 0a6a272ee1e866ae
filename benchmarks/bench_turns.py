"""Question: what does a conversation of many turns, tool outputs between them, compute again?

    python benchmarks/bench_turns.py --turns 8

Each turn's prompt is the last one's, the very ids that were sampled, and a tool's output. Of what
two turns share, all but the last sampled token is in the prefix cache. The time to the first token
is that of the last turn with the cache and without it. Bar: 0.95 of what is
shared is cached.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from harness.command import Command, parts_of
from harness.engines import make_engine, warm_up
from harness.prompts import chat
from harness.rows import Row, row

from rollout import Rollout, RolloutEngine, SamplingParams

_CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Hanoi", "Accra", "Riga")
_TASK = (
    "You are given one record of {count} after another by a tool, as JSON. After each record "
    "repeat all records so far, one in a line, as JSON, and nothing else. This is conversation "
    "{index}."
)
_TEMPERATURE = 0.5
_SHARE_BAR = 0.95


@dataclass
class Turn:
    """What one turn of one conversation took."""

    rollout: Rollout
    shared: int  # tokens of the prompt whose KV the last turn computed


@dataclass
class Conversation:
    """The ids of a conversation, as they were given and sampled."""

    ids: list[int]
    turns: list[Turn] = field(default_factory=list)

    def take(self, engine: RolloutEngine, params: SamplingParams) -> None:
        """Let the model answer."""
        computed = 0 if not self.turns else len(self._last.prompt_ids) + len(self._last.token_ids)
        (rollout,) = engine.generate([self.ids], params)
        self.turns.append(Turn(rollout, max(0, computed - 1)))
        self.ids = [*self.ids, *rollout.token_ids]

    def tell(self, engine: RolloutEngine, record: dict[str, object]) -> None:
        """Add a tool's output, and the beginning of the next answer."""
        ended = self.ids[-1] in engine.eos_token_ids
        text = "" if ended else "<|im_end|>"
        text += f"\n<|im_start|>tool\n{json.dumps(record)}<|im_end|>\n<|im_start|>assistant\n"
        self.ids = [*self.ids, *engine.encoder.encode_word(text)]

    @property
    def _last(self) -> Rollout:
        return self.turns[-1].rollout


def turn_rows(options: argparse.Namespace) -> Iterator[Row]:
    engine = make_engine(options.model, "ngram", 4, {})
    params = SamplingParams(max_new_tokens=options.tokens, seed=3, temperature=_TEMPERATURE)
    warm_up(engine, [chat("Name a colour.")], options.tokens)
    held = [_conversation(engine, params, index, options) for index in range(options.conversations)]
    turns = [turn for each in held for turn in each.turns]
    later = [turn for each in held for turn in each.turns[1:]]
    cached = sum(turn.rollout.stats.cached_tokens for turn in later)
    shared = sum(turn.shared for turn in later)
    yield row("prompt tokens of the last turn", len(held[0].turns[-1].rollout.prompt_ids), "tokens")
    yield row("of what turns share, cached", cached / shared, "", bar=_SHARE_BAR)
    prompts = sum(len(turn.rollout.prompt_ids) for turn in turns)
    yield row("of all prompt tokens, cached", cached / prompts, "")
    with_cache = median([_first_token(each.turns[-1].rollout) for each in held])
    cold = median([_first_token(_again(engine, each, params)) for each in held])
    yield row("time to the first token of the last turn", 1000 * with_cache, "ms")
    yield row("the same without the prefix cache", 1000 * cold, "ms")
    yield row("the latter over the former", cold / with_cache, "x")
    engine.close()


def _conversation(
    engine: RolloutEngine, params: SamplingParams, index: int, options: argparse.Namespace
) -> Conversation:
    task = _TASK.format(count=options.turns, index=index)
    conversation = Conversation(engine.encoder.encode(chat(task)))
    for turn in range(options.turns):
        if turn:
            city = _CITIES[(turn + index) % len(_CITIES)]
            record = {"row": turn, "city": city, "visitors": 1000 * turn + 17 * index}
            conversation.tell(engine, record)
        conversation.take(engine, params)
    return conversation


def _again(engine: RolloutEngine, conversation: Conversation, params: SamplingParams) -> Rollout:
    """The last turn, of which nothing is cached."""
    engine.flush_cache()
    (rollout,) = engine.generate([conversation.turns[-1].rollout.prompt_ids], params)
    assert rollout.stats.cached_tokens == 0
    return rollout


def _first_token(rollout: Rollout) -> float:
    seconds = rollout.stats.first_token_seconds
    assert seconds is not None
    return seconds


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.option("--conversations", 4, quick=1, help="one after the other")
    command.option("--turns", 8, quick=3, help="of each")
    command.option("--tokens", 48, quick=8, help="most of an answer")
    command.threads(2)
    return command


if __name__ == "__main__":
    make_command().run("turns, {threads} threads", parts_of({"turns": turn_rows}))
