"""The values of a few words in calls and results."""

from __future__ import annotations

import enum


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # max_new_tokens, or the context is full
    ABORT = "abort"  # the caller asked for it
    ERROR = "error"  # its logits were not finite; the rollout's `error` says more


class PauseMode(enum.StrEnum):
    """The treatment of requests in flight while generation is paused."""

    ABORT = "abort"  # they end with the tokens they have
    RETRACT = "retract"  # running ones return to the waiting queue and recompute their KV
    IN_PLACE = "in_place"  # they keep their KV and continue


class MemoryTag(enum.StrEnum):
    """Parts of an engine's memory that can be released separately."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    GRAPHS = "graphs"  # captured forwards
