"""What sharing the corpus costs: bytes on the wire, tokens to insert, history that fits."""

from __future__ import annotations

import enum
from dataclasses import dataclass

SHARE_SECONDS = 0.5  # between two deltas
PIECE_BYTES = 33  # of a CorpusDelta: one entry of each array over B
TOKEN_BYTES = 4
CORPUS_BYTES_PER_TOKEN = 31  # held, with its index
INSERTED_PER_SECOND = 4e6  # tokens a core learns


class FanOut(enum.StrEnum):
    ALL = "all to all"
    SAMPLED = "8 others, in turn"
    GROUP = "groups that spread"  # to those that run rollouts of the same prompt


NUM_SAMPLED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    received_per_replica: float  # bytes/s
    total: float  # bytes/s, of the whole cluster
    core_share: float  # of one core, for learning what comes
    seconds_held: float  # of history in the corpus


def traffic(
    fan_out: FanOut,
    num_replicas: int,
    tokens_per_second: float,
    running: float,
    spread: float,
    corpus_bytes: float = 256 * 2**20,
) -> Traffic:
    """Args:
    tokens_per_second, running: of one replica.
    spread: share of groups that run on more than one replica.
    """
    receivers = {
        FanOut.ALL: num_replicas - 1,
        FanOut.SAMPLED: min(NUM_SAMPLED, num_replicas - 1),
        FanOut.GROUP: spread,
    }[fan_out]
    pieces_per_second = running / SHARE_SECONDS
    sent = TOKEN_BYTES * tokens_per_second + PIECE_BYTES * pieces_per_second
    learned = tokens_per_second * receivers
    return Traffic(
        received_per_replica=sent * receivers,
        total=sent * receivers * num_replicas,
        core_share=learned / INSERTED_PER_SECOND,
        seconds_held=corpus_bytes / CORPUS_BYTES_PER_TOKEN / (tokens_per_second + learned),
    )
