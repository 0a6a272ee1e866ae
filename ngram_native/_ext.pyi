# ruff: noqa
# fmt: off
from collections.abc import Callable
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Withdrawn:
    def free(self) -> None: ...

class Proposal:
    """
    Draft nodes of a batch, flat, without the roots.

    Entry b owns nodes ``[offsets_B1[b], offsets_B1[b + 1])``, best first, so a prefix of an entry
    is the best tree of that size. Within an entry tree node 0 is the root (the last committed
    token, not stored) and its node j, from 0, is tree node j + 1; parents come before children.
    Each array is a view of the proposal's own memory.
    """

    def __len__(self) -> int: ...

    @property
    def offsets_B1(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]:
        """int64 ``(B + 1,)``."""

    @property
    def tokens_N(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32 ``(N,)``."""

    @property
    def parents_N(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32 ``(N,)``, in tree numbering within the entry."""

    @property
    def depths_N(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C')]:
        """int32 ``(N,)``; the root has 0."""

    @property
    def masks_N(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C')]:
        """
        uint64 ``(N,)``; bit k: tree node k is on the path, the node itself and the root included.
        """

    @property
    def probabilities_N(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')]:
        """float32 ``(N,)``: estimated probability that the node is accepted."""

    @property
    def sources_N(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]:
        """
        uint8 ``(N,)``, a `Source` each: where the longest match that proposes the node was found.
        """

class Corpus:
    def __init__(self, *, max_bytes: int, max_external_bytes: int, max_candidates: int, max_steps: int, vocabulary: str, vocab_size: int) -> None: ...

    def insert(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], group: int | None) -> None: ...

    def open(self, sequence_id: int, group: int, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], age: int) -> None: ...

    def extend(self, sequence_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], verified: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, age: int) -> None: ...

    def propose(self, sequence_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], budgets: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], min_probability: float) -> Proposal: ...

    def query(self, group: int, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], budget: int, min_probability: float) -> Proposal: ...

    def max_sequences(self) -> int: ...

    def close(self, sequence_id: int) -> None: ...

    def set_weight_version(self, version: int) -> None: ...

    def add_external(self, name: str, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def publish_external(self, name: str, builder: ExternalBuilder) -> None: ...

    def withdraw_external(self, name: str) -> Withdrawn: ...

    def remove_external(self, name: str) -> None: ...

    def external_names(self) -> list[str]: ...

    def external_sizes(self) -> dict[str, tuple[int, int]]: ...

    def reset(self) -> None: ...

    def save(self, descriptor: int) -> None: ...

    def load(self, descriptor: int) -> None: ...

    def check(self) -> str: ...

    def num_tokens(self) -> int: ...

    def num_bytes(self) -> int: ...

    def counters(self) -> dict[str, float]: ...

class ExternalBuilder:
    def __init__(self, corpus: Corpus) -> None: ...

    def append(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def build(self, proceed: Callable[[], bool]) -> bool: ...

    def cancel(self) -> None: ...

    def free(self) -> None: ...

    def num_tokens(self) -> int: ...

    def num_bytes(self) -> int: ...

    def fraction_indexed(self) -> float: ...
