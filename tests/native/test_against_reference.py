"""The corpus gives the brute-force reference's trees, whatever was called before."""

from __future__ import annotations

from tests.native.interleaved import Interleaved, repeatable

TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = repeatable(max_examples=100, steps=40)
