"""The corpus gives the reference's trees after longer histories than in `make test`."""

from __future__ import annotations

from tests.native.interleaved import Interleaved, repeatable


class Longer(Interleaved):
    """A class of its own: settings belong to the class."""


TestInterleaved = Longer.TestCase
TestInterleaved.settings = repeatable(max_examples=60, steps=80)
