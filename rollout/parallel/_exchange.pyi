"""
Exchanges between the ranks of one host, by address.
"""

from collections.abc import Sequence

SLOT_BYTES: int = 262144

class Exchange:
    """A rank's end of the memory that ranks exchange through."""

    @staticmethod
    def create(size: int, timeout: float) -> Exchange:
        """Rank 0's."""

    @staticmethod
    def open(path: str, rank: int, size: int, timeout: float) -> Exchange:
        """Another rank's, of rank 0's path."""

    @property
    def path(self) -> str: ...
    def gather_columns(
        self,
        own: int,
        rows: int,
        stride: int,
        ends: Sequence[int],
        out: int,
        ahead: int,
        ahead_bytes: int,
    ) -> None: ...
    def broadcast(self, data: int, bytes: int) -> None: ...
    def gone(self) -> list[int]:
        """Ranks that have ended or left."""

    def leave(self) -> None: ...
