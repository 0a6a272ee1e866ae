"""Buckets: one greedy layout, no copies out, one buffer, and a manifest that is checked."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import InvalidInputError
from rollout.weights.bucket import BucketSource, FlattenedBucket, buckets
from rollout.weights.bucket_layout import ALIGNMENT, BucketLayout, layouts
from rollout.weights.manifest import TensorSpec
from tests.helpers.weight_transports import Announced

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def some_tensors(seed: int, count: int = 40) -> dict[str, torch.Tensor]:
    """Tensors of odd sizes and every dtype; some scalar, empty, or not contiguous."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    found = {}
    for index in range(count):
        shape = rng.choice([(), (0,), (rng.randrange(1, 90),), (rng.randrange(1, 40), 7)])
        tensor = torch.randn(shape, generator=generator).to(rng.choice(DTYPES))
        found[f"tensor.{index}"] = tensor.t() if tensor.dim() == 2 and index % 2 else tensor
    return found


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), bucket_bytes=st.integers(64, 5000))
def test_what_goes_in_comes_out(seed, bucket_bytes):
    tensors = some_tensors(seed)
    planned = layouts(Announced(tensors).manifest(), bucket_bytes)
    out = {}
    for layout, bucket in zip(planned, buckets(tensors.items(), bucket_bytes), strict=True):
        assert bucket.layout == layout, "a receiver that knows the manifest knows the layout"
        assert BucketLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
        assert layout.num_bytes <= bucket_bytes or len(layout.entries) == 1
        for name, view in bucket.unflatten():
            assert view.data_ptr() % ALIGNMENT == 0 or view.numel() == 0
            out[name] = view.clone()
    assert list(out) == list(tensors)
    for name, tensor in tensors.items():
        assert out[name].dtype == tensor.dtype
        assert torch.equal(out[name], tensor)


def test_one_buffer_is_reused_and_large_tensors_are_not_copied():
    tensors = {f"t{i}": torch.full((30,), float(i)) for i in range(12)}
    tensors["large"] = torch.randn(1000)
    found = [(bucket.flat.data_ptr(), bucket.layout) for bucket in buckets(tensors.items(), 512)]
    *small, (large, layout) = found
    assert len({pointer for pointer, _ in small}) == 1
    assert len(small) > 2
    assert large == tensors["large"].data_ptr()
    assert [entry.name for entry in layout.entries] == ["large"]
    (bucket,) = buckets(Announced({"w": torch.ones(8)}), 2**30)
    assert bucket.flat.numel() <= 2 * ALIGNMENT, "a buffer is no larger than all there is"
    ((_, view),) = bucket.unflatten()
    bucket.flat.zero_()
    assert not view.any(), "views share the buffer"


def test_buckets_of_one_buffer_cannot_be_kept():
    tensors = {f"t{i}": torch.full((16,), float(i)) for i in range(4)}
    with pytest.raises(InvalidInputError, match="hand over the iterator"):
        BucketSource(list(buckets(tensors.items(), 64))).manifest()
    kept = [FlattenedBucket(b.flat.clone(), b.layout) for b in buckets(tensors.items(), 64)]
    assert [name for name, _ in BucketSource(kept)] == list(tensors)
    with pytest.raises(InvalidInputError, match=r"named_tensors\[0\]"):
        BucketSource([("name", torch.zeros(1))]).manifest()


def test_buffers_and_sizes_that_cannot_hold_a_bucket_are_refused():
    (layout,) = layouts({"w": TensorSpec((16,), torch.float32)}, 64)
    for flat in (
        torch.zeros(64),
        torch.zeros(8, 8, dtype=torch.uint8),
        torch.zeros(63, dtype=torch.uint8),
        torch.zeros(128, dtype=torch.uint8)[::2],
        torch.zeros(128, dtype=torch.uint8)[1:],
    ):
        with pytest.raises(InvalidInputError, match="flat"):
            FlattenedBucket(flat, layout)
    for bucket_bytes in (63, 64.5):
        with pytest.raises(InvalidInputError, match="bucket_bytes"):
            list(buckets([], bucket_bytes))


def manifest_json():
    specs = {"a": TensorSpec((3, 5), torch.bfloat16), "b": TensorSpec((7,), torch.float32)}
    (layout,) = layouts(specs, 2**10)
    return json.loads(json.dumps(layout.to_json()))


MALFORMED = [
    (("num_bytes",), 91, "layout.entries[1].end"),
    (("num_bytes",), 93, "layout.num_bytes"),
    (("num_bytes",), -1, "layout.num_bytes"),
    (("entries",), {}, "layout.entries"),
    (("entries", 0), [], "layout.entries[0]"),
    (("entries", 0, "surprise"), 1, "layout.entries[0]"),
    (("entries", 0, "name"), "", "layout.entries[0].name"),
    (("entries", 0, "name"), "b", "layout.entries"),
    (("entries", 0, "dtype"), "bfloat17", "layout.entries[0].dtype"),
    (("entries", 0, "dtype"), "Tensor", "layout.entries[0].dtype"),
    (("entries", 0, "dtype"), None, "layout.entries[0].dtype"),
    (("entries", 0, "dtype"), "float32", "layout.entries[0].end"),
    (("entries", 0, "shape"), 15, "layout.entries[0].shape"),
    (("entries", 0, "shape"), [-3, -5], "layout.entries[0].shape[0]"),
    (("entries", 0, "start"), 1, "layout.entries[0].start"),
    (("entries", 0, "start"), None, "layout.entries[0].start"),
    (("entries", 0, "end"), "30", "layout.entries[0].end"),
]


def test_a_malformed_layout_is_refused_by_field():
    for path, value, field in MALFORMED:
        layout = at = manifest_json()
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        with pytest.raises(InvalidInputError) as error:
            BucketLayout.from_json(layout)
        assert error.value.field == field, (path, value)
    for value in (None, {"num_bytes": 0}):
        with pytest.raises(InvalidInputError, match="layout"):
            BucketLayout.from_json(value)
    overlapping = manifest_json()
    overlapping["entries"][1] |= {"start": 0, "end": 28}
    with pytest.raises(InvalidInputError, match=r"entries\[1\]\.start.*overlaps 'a'"):
        BucketLayout.from_json(overlapping)
