"""The names that others have for sampling parameters."""

from __future__ import annotations

import pytest

from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import (
    our_fields,
    refuse_unhonoured,
)


def test_none_is_the_default_and_the_later_name_counts() -> None:
    given = {"stop": ["a"], "stop_strings": "b", "max_tokens": 3, "max_new_tokens": None, "n": 1}
    assert our_fields(given) == {"stop": ["b"]}


def test_what_is_refused() -> None:
    def refuse(**given: object) -> None:
        refuse_unhonoured(given, lambda name: f"params.{name}", but=["seed"])

    refuse(n=1, do_sample=True, detokenize=False, bad_words=None, top_k=3)
    with pytest.raises(InvalidInputError, match=r"^params\.n=2: must be 1"):
        refuse(n=2)
    with pytest.raises(
        InvalidInputError, match=r"^params\.logits_processors=\['x'\]: .*temperature"
    ):
        refuse(logits_processors=["x"])
    with pytest.raises(InvalidInputError, match=r"^params\.seed=3") as refused:
        refuse(seed=3)
    assert "sampling_seed" in refused.value.remedy
    assert " seed," not in refused.value.remedy
