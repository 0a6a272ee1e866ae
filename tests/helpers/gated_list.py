"""Documents of a corpus that loads only as far as a test lets it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from tests.helpers.hang import HANG_SECONDS


class GatedList(list[Any]):
    """A list that hands out its first item, and the others once it is opened."""

    def __init__(self, items: Iterable[Any], opened: threading.Event | None = None) -> None:
        super().__init__(items)
        self.opened = opened or threading.Event()
        self.reached = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        items = super().__iter__()
        yield from islice(items, 1)
        self.reached.set()
        assert self.opened.wait(HANG_SECONDS)
        yield from items
