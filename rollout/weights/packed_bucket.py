"""A bucket as it crosses processes: bytes and JSON."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.errors import InvalidInputError
from rollout.weights.bucket import FlattenedBucket
from rollout.weights.bucket_layout import BucketLayout


@dataclass(frozen=True, slots=True, eq=False)
class PackedBucket:
    """No object of torch's is in it, so none is unpickled where it arrives."""

    flat: NDArray[np.uint8]  # (num_bytes,)
    layout: Mapping[str, Any]  # BucketLayout.to_json()

    @classmethod
    def of(cls, bucket: FlattenedBucket) -> Self:
        """A copy: the bucket's buffer may be used again."""
        return cls(bucket.used.cpu().numpy().copy(), bucket.layout.to_json())

    def unpacked(self) -> FlattenedBucket:
        """Views of ``flat``. Raises InvalidInputError, naming the field, for a malformed one."""
        layout = BucketLayout.from_json(self.layout, "bucket.layout")
        if not isinstance(self.flat, np.ndarray) or self.flat.dtype != np.uint8:
            raise InvalidInputError("bucket.flat", type(self.flat), "must be an array of uint8")
        with warnings.catch_warnings():  # of memory that must not be written: it is only read
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return FlattenedBucket(torch.from_numpy(self.flat), layout)
