"""TRL's sampling options in the engine's terms, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")

from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import FIELD_OF
from rollout.trainers.trl.colocated import TrlSampleSeeds
from rollout.trainers.trl.sampling import sampling_params
from rollout.trainers.trl.server_engine import _SENT
from rollout.types import SamplingParams

OPTIONS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.1,
    "max_completion_length": 12,
    "eos_token_ids": [2, 5],
    "top_logprobs": 0,
    "generation_kwargs": {},
}


def test_options_keep_their_meaning() -> None:
    assert sampling_params(**OPTIONS) == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=0,
        repetition_penalty=1.1,
        max_new_tokens=12,
        stop_token_ids=[2, 5],
        ignore_eos=True,  # the engine's own; the trainer's are stop tokens
    )


CHANGES: list[tuple[str, object, dict[str, Any]]] = [
    ("max_new_tokens", 7, {"max_new_tokens": 7}),
    ("stop_strings", ["three"], {"stop": ["three"]}),
    ("stop_token_ids", [9], {"stop_token_ids": [9, 2, 5]}),
    ("ignore_eos", True, {"stop_token_ids": []}),
    ("top_k", None, {"top_k": -1}),
    ("n", 1, {}),
]


def test_generation_kwargs_go_over_the_others() -> None:
    plain = sampling_params(**OPTIONS)
    for name, value, changed in CHANGES:
        expected = {field: getattr(plain, field) for field in SamplingParams.__slots__} | changed
        found = sampling_params(**OPTIONS | {"generation_kwargs": {name: value}})
        assert found == SamplingParams(**expected), name


def test_what_cannot_be_honoured_is_refused_by_name() -> None:
    for name, value in (
        ("structured_outputs", {"regex": "a"}),
        ("do_sample", False),
    ):
        with pytest.raises(InvalidInputError, match=rf"generation_kwargs\['{name}'\]"):
            sampling_params(**OPTIONS | {"generation_kwargs": {name: value}})
    with pytest.raises(InvalidInputError, match="temperature=0"):
        sampling_params(**OPTIONS | {"temperature": 0.0})


def test_a_server_is_sent_all_that_changes_what_is_sampled() -> None:
    assert set(FIELD_OF.values()) - set(_SENT) == {"seed", "logprob_token_ids"}


def test_seeds_do_not_depend_on_the_number_of_processes() -> None:
    alone = TrlSampleSeeds(7, 0)
    pair = [TrlSampleSeeds(7, rank) for rank in range(2)]
    for step, training in ((0, True), (0, True), (0, False), (1, True)):
        whole = alone.next_batch(8, 4, step=step, training=training)
        halves = [seeds.next_batch(4, 4, step=step, training=training) for seeds in pair]
        assert whole == halves[0] + halves[1]


def test_no_two_samples_share_a_seed() -> None:
    """Later turns of a conversation come in numbers that differ from process to process."""
    seen: list[int] = []
    ranks = [TrlSampleSeeds(7, rank) for rank in range(3)]
    for step in range(3):
        for training in (True, False):
            for sizes in ((4, 4, 4), (3, 1, 2), (1, 3, 1)):
                for seeds, size in zip(ranks, sizes, strict=True):
                    seen += seeds.next_batch(size, 2, step=step, training=training)
    assert len(seen) == len(set(seen))


def test_a_resumed_run_goes_on_with_the_seeds_it_would_have_had() -> None:
    whole, resumed = TrlSampleSeeds(7, 0), TrlSampleSeeds(7, 0)
    for step in range(3):
        expected = whole.next_batch(4, 2, step=step, training=True)
        whole.next_batch(6, 2, step=step, training=False)
    assert resumed.next_batch(4, 2, step=2, training=True) == expected
