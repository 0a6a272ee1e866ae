"""GRPO in two processes, each with an engine of its own, and with one of two ranks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("deepspeed")

from tests.helpers.launch import launch
from tests.helpers.text_model import save_text_model
from tests.helpers.trl_runs import by_rollout_func, run

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The measurements of each rank, by the way it generated."""
    folder = tmp_path_factory.mktemp("trl")
    save_text_model(folder / "model")
    return launch("tests.trainers.trl_ranks", folder, ranks=2)


@pytest.fixture(scope="module")
def samples_of_one(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The samples of the first prompt that one process draws."""
    folder = tmp_path_factory.mktemp("alone")
    model = save_text_model(folder / "model")
    options = {"per_device_train_batch_size": 8, "num_generations": 8, "max_steps": 1}
    return run(by_rollout_func(model, folder, **options)).completion_ids[0]


@pytest.mark.parametrize("way", ["rollout_func", "tensor", "generation"])
def test_two_processes(
    by_rank: list[dict[str, Any]], samples_of_one: list[list[int]], way: str
) -> None:
    ranks = [results[way] for results in by_rank]
    assert [rank["version"] for rank in ranks] == [2, 2]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    for rank in ranks:
        assert rank["sharded"] == (way == "generation")
        assert rank["ranks"] == (2 if way == "tensor" else 1)
        assert len(rank["logp_differences"]) == (0 if way == "rollout_func" else 2)
        assert all(difference < 2e-5 for difference in rank["logp_differences"])
    first = [*ranks[0]["completion_ids"][0], *ranks[1]["completion_ids"][0]]
    assert samples_of_one == first
