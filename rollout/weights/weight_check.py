"""Checks of an update: a snapshot, weights that are lost on purpose, and the comparison after it.

Each rank looks at what it stores; all of them end alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.models.layers.weight_loader import WeightLoader
from rollout.parallel import RankGroup
from rollout.weights.transaction import WeightTransaction

ACTIONS = ("checksum", "snapshot", "reset_tensors", "compare")

Checksums = dict[str, str]
"""By name, of the bytes that a rank stores of a tensor: BLAKE2b of 64 bits, in hexadecimal."""

_MAX_NAMED = 8  # differing tensors in an error


class WeightCheck:
    """The checks of one rank."""

    def __init__(self, weights: WeightTransaction, ranks: RankGroup) -> None:
        self._weights = weights
        self._ranks = ranks
        self._snapshot: dict[str, torch.Tensor] | None = None

    def run(self, action: str, selector: str, skip: Sequence[str]) -> list[Checksums]:
        """Run one of ACTIONS over the tensors of the selected parts, without those whose names have
        a text of ``skip``. Returns checksums by rank; empty ones for other actions.

        - ``snapshot``: copy them to host memory, in place of an earlier snapshot.
        - ``reset_tensors``: overwrite them with noise. Nothing runs until a full update.
        - ``compare``: with the snapshot, which is dropped where all are equal.

        Raises InvalidInputError, EngineStateError while the weights are released, and
        WeightUpdateError during an update, without a snapshot, and where tensors differ.
        """
        if action not in ACTIONS:
            raise InvalidInputError("action", action, f"must be one of {', '.join(ACTIONS)}")
        self._weights.require_resident()
        parts = self._weights.parts.selected(selector)
        loaders = {
            name: loader
            for name, loader in sorted(self._weights.parts.stored(parts).items())
            if not any(text in name for text in skip)
        }
        found: dict[str, Any] = {"checksums": {}, "error": ""}
        try:
            match action:
                case "checksum":
                    found["checksums"] = {name: _checksum(loaders[name]) for name in loaders}
                case "snapshot":
                    self._snapshot = {name: _read(loader) for name, loader in loaders.items()}
                case "reset_tensors":
                    self._reset(loaders, parts)
                case "compare":
                    self._compare(loaders)
        except (RolloutError, RuntimeError) as error:  # the others wait
            found["error"] = str(error)
        of_ranks = [json.loads(text) for text in self._ranks.all_gather_text(json.dumps(found))]
        for rank, each in enumerate(of_ranks):
            if each["error"]:
                raise WeightUpdateError(f"rank {rank}: {each['error']}")
        if action == "compare":
            self._snapshot = None
        return [each["checksums"] for each in of_ranks]

    def _reset(self, loaders: dict[str, WeightLoader], parts: frozenset[str]) -> None:
        if self._weights.is_under_way:
            raise WeightUpdateError("a weight update is under way; end or abandon it first")
        self._weights.tear(parts, "the weights were reset")
        for loader in loaders.values():
            loader.write(_noise(loader.read()))
        for part in sorted(parts):
            self._weights.parts[part].finish_loading()

    def _compare(self, loaders: dict[str, WeightLoader]) -> None:
        before = self._snapshot
        if before is None:
            raise WeightUpdateError("there is no snapshot to compare with: take one first")
        errors = {
            name: (old.float() - new.float()).abs().max().item()
            for name, loader in loaders.items()
            if (old := before.get(name)) is not None and not _is_equal(old, new := _read(loader))
        }
        missing = sorted(loaders.keys() - before.keys())
        if missing:
            raise WeightUpdateError(f"the snapshot has no {missing[0]}: take one of these parts")
        if errors:
            named = [f"name={name} max_abs_err={err:g}" for name, err in errors.items()]
            raise WeightUpdateError(
                f"{len(errors)} of {len(loaders)} tensors differ from the snapshot: "
                + "; ".join(named[:_MAX_NAMED])
            )


def _read(loader: WeightLoader) -> torch.Tensor:
    return loader.read().to("cpu").contiguous()


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bytes(a), _bytes(b))


def _checksum(loader: WeightLoader) -> str:
    data = _bytes(_read(loader)).numpy().data
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _noise(like: torch.Tensor) -> torch.Tensor:
    return torch.rand(like.shape, dtype=torch.float32, device=like.device).to(like.dtype)
