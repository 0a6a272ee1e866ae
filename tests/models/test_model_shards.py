"""Models of which each rank has a part: each tensor is somewhere, and logits are the whole's."""

from __future__ import annotations

import pytest
import torch

from rollout.config import DType
from rollout.models.checkpoint import Checkpoint
from rollout.models.loader import load_model
from rollout.parallel import ModelRanks
from tests.helpers.biased_llama import save_biased_llama
from tests.helpers.dense_attention import logits_of
from tests.helpers.thread_ranks import on_ranks
from tests.helpers.tiny_deepseek import tiny_deepseek
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_moe import save_tiny_moe

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53, 58, 9], [7]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_deepseek("deepseek_v3").save_pretrained(root / "latent")
    return {
        "biased": save_biased_llama(root / "biased"),
        "tied": save_biased_llama(root / "tied", tied=True),
        "hybrid": save_tiny_hybrid(root / "hybrid", "qwen3_5"),
        "shared": save_tiny_hybrid(root / "shared", "qwen3_next", experts=True),
        "experts": save_tiny_moe(root / "experts"),
        "latent": root / "latent",
    }


def load(folder, packing=True, **options):
    return load_model(folder, DType.float32, CPU, packing=packing, **options)


@pytest.mark.parametrize(
    ("name", "size", "packing"),
    [
        ("biased", 4, True),
        ("tied", 2, True),
        ("hybrid", 2, True),
        ("shared", 2, True),
        ("experts", 2, False),
        ("latent", 3, False),
    ],
)
def test_tensor_parallel_ranks(name, size, packing, folders):
    whole = load(folders[name], packing)
    wanted = logits_of(whole, PROMPTS)
    stored = dict(Checkpoint(folders[name]))

    def on_rank(group):
        model = load(folders[name], packing, ranks=ModelRanks.of_tensor(group))
        assert model.weight_loaders().keys() == whole.weight_loaders().keys()
        for key, tensor in stored.items():
            assert torch.equal(model.weight_loaders()[key].read(), tensor), key
        return logits_of(model, PROMPTS), sum(linear.out_features for linear in model.linears())

    ranks = on_ranks(size, on_rank)
    for logits, _ in ranks:
        for ours, theirs in zip(logits, wanted, strict=True):
            if packing:  # plain products choose kernels by the number of outputs
                assert torch.equal(ours, theirs)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert ranks[0][1] < sum(linear.out_features for linear in whole.linears())


@pytest.mark.parametrize(("name", "split"), [("biased", 4), ("hybrid", 8), ("latent", 4)])
def test_ranks_that_add_up_products_save_an_exchange_for_each(name, split, folders):
    """``split``: products whose inputs are split."""
    whole, stored = load(folders[name]), dict(Checkpoint(folders[name]))
    wanted = logits_of(whole, PROMPTS)

    def on_rank(group):
        def exchanges(*, exact):
            model = load(folders[name], ranks=ModelRanks.of_tensor(group), exact=exact)
            for key, tensor in stored.items():
                assert torch.equal(model.weight_loaders()[key].read(), tensor), key
            before = group.num_exchanges
            for ours, theirs in zip(logits_of(model, PROMPTS), wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            return group.num_exchanges - before

        return exchanges(exact=True) - exchanges(exact=False)

    assert on_ranks(2, on_rank) == [split] * 2


@pytest.mark.parametrize(("name", "size"), [("biased", 3), ("experts", 2)])
def test_ranks_with_rows_of_their_own_are_bitwise_one(name, size, folders):
    whole = load(folders[name])
    stored = dict(Checkpoint(folders[name]))

    def on_rank(group):
        model = load(folders[name], ranks=ModelRanks.of_rows(group))
        for key, tensor in stored.items():
            assert torch.equal(model.weight_loaders()[key].read(), tensor), key
        own = [PROMPTS[0], [], [8] * 40][group.rank]
        return torch.equal(logits_of(model, [own])[0], logits_of(whole, [own])[0])

    assert all(on_ranks(size, on_rank))
