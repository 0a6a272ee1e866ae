"""Ranks whose parts of a product differ make the same collectives in a warm-up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from rollout.config import DType, LoadFormat
from rollout.models.loader import load_model
from rollout.parallel import ModelRanks
from rollout.runner.dummy_run import DummyRun
from rollout.runner.profile_run import warm_rows, warm_up
from tests.helpers.fake_cuda import FakeGpu
from tests.helpers.fake_cuda.models import MODELS

ROWS = 512
VOCAB = 16_897  # one more of it has other tiles


class ListenedRank:
    """A `RankGroup` whose other rank is not there: it has the same tensors, and has said ``told``
    where it is rank 0. Its collectives are noted."""

    size = 2

    def __init__(self, rank: int, told: list[bytes]) -> None:
        self.rank = rank
        self._told = told
        self.collectives: list[tuple[str, Sequence[int]]] = []

    def all_gather_columns(self, x_TC: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        gathered = x_TC.new_empty(len(x_TC), parts[-1].stop)
        self.collectives.append(("gather", gathered.shape))
        return gathered

    def sum_disjoint(self, x: torch.Tensor) -> torch.Tensor:
        self.collectives.append(("sum", x.shape))
        return x

    def all_gather_int(self, number: int) -> list[int]:
        return [number] * self.size

    def broadcast_bytes(self, data: bytes) -> bytes:
        if self.rank == 0:
            self._told.append(data)
        return self._told[-1]


def test_a_warm_up_of_ranks_with_unequal_parts_makes_the_same_collectives(
    gpu: FakeGpu, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            MODELS["demo"]
            | {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": VOCAB}
        )
    )
    told: list[bytes] = []
    ranks = [ListenedRank(rank, told) for rank in range(2)]
    own: list[dict[int, bool]] = []
    for rank in ranks:
        model = load_model(
            str(tmp_path), DType.auto, torch.device("cuda", 0), 4096, load_format=LoadFormat.dummy,
            ranks=ModelRanks.of_tensor(rank),
        )  # fmt: skip
        for linear in model.linears():
            linear.row_invariant = True
        own.append(warm_rows(ROWS, model.linears()))
        warm_up(DummyRun(model), rows=ROWS, sampled=64)
    assert own[0] != own[1], "the vocabulary is to be such that ranks would choose other rows"
    assert ranks[0].collectives == ranks[1].collectives
    assert ranks[0].collectives
