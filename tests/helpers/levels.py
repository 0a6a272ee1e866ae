"""The levels of a draft that has no networks, for tests of how trees grow."""

from __future__ import annotations

from typing import Any

import numpy as np


class NoNetworks:
    """A `DraftLevels` with neither inputs nor changes. Subclasses give hidden states and logits."""

    def inputs(self, rows_G: np.ndarray, padding: int) -> dict[str, Any]:
        return {}

    def changes(self, rows_G: np.ndarray) -> dict[str, Any]:
        return {}

    def apply(self, tensors: dict[str, Any], rows_G: np.ndarray) -> None: ...

    def longest(self, rows_G: np.ndarray) -> int:
        return 1
