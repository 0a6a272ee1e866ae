"""Graphs on the CPU: calls of ops that are made again give the bits of the function's own."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from rollout.ops.glu import silu_mul
from rollout.ops.rms_norm import add_rms_norm, rms_norm
from rollout.runner.graphs.capture import GraphTooLargeError
from rollout.runner.graphs.host_capture import HostCapture
from tests.helpers.compared import numbers
from tests.helpers.oracle_worker import oracle_factory
from tests.helpers.tiny_deepseek import save_tiny_deepseek
from tests.helpers.tiny_families import save_tiny_family
from tests.helpers.tiny_hybrid import save_tiny_hybrid

PROMPTS = [[5, 6, 7], [8, 9, 10, 11] * 9, [5, 6, 7, 12], [40, 41]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=40, seed=3, n=2, ignore_eos=True)


def captured(function: Callable[[], torch.Tensor], max_bytes: int | None = None):
    return HostCapture()(lambda: {"result": function()}, dict, max_bytes)


class Network:
    """Own ops and torch's in turn: views, products, in-place additions, a gather, a copy."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(rows)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.table_VE, self.norm_E = random(50, 24), random(24)
        self.gate_up_2FE, self.down_EF = random(48, 24), random(24, 24)
        self.ids_T = torch.randint(50, (rows,), generator=generator)
        self.rows_T = torch.randint(rows, (rows,), generator=generator)

    def __call__(self) -> torch.Tensor:
        residual_TE = self.table_VE[self.ids_T]
        x_TE = rms_norm(residual_TE, self.norm_E, 1e-5)
        for _ in range(5):
            gate_up_T2F = torch.nn.functional.linear(x_TE, self.gate_up_2FE)
            fed_TE = silu_mul(gate_up_T2F) @ self.down_EF.T
            fed_TE += x_TE.flip(0)
            x_TE = add_rms_norm(fed_TE.flatten().view(-1, 24), residual_TE, self.norm_E, 1e-5)
        return x_TE[self.rows_T] if len(x_TE) % 2 else x_TE


@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (17, torch.float16)]
)
@torch.inference_mode()
def test_calls_made_again_give_the_functions_bits_on_new_inputs(rows, dtype) -> None:
    network = Network(rows, dtype)
    first = network()
    graph = captured(network)
    assert torch.equal(graph.results["result"], first)
    for turn in range(4):
        network.ids_T.copy_(torch.randint(50, (rows,)))
        network.down_EF.copy_(torch.randn(24, 24))  # as an update of weights
        for block in graph.memory.blocks:  # what is left of the last run is nobody's
            torch.empty(0, dtype=torch.uint8).set_(block).fill_(255)
        graph.replay()
        gc.collect()
        assert torch.equal(graph.results["result"], network()), turn


@torch.inference_mode()
def test_memory_is_handed_out_again() -> None:
    x_TE, norm_E = torch.randn(8, 64), torch.randn(64)

    def chain() -> torch.Tensor:
        y_TE = x_TE
        for _ in range(50):
            y_TE = rms_norm(y_TE, norm_E, 1e-5)
        return y_TE

    graph = captured(chain)
    assert graph.num_bytes == 2 * x_TE.nbytes
    with pytest.raises(GraphTooLargeError) as raised:
        captured(chain, max_bytes=graph.num_bytes - 1)
    assert raised.value.num_bytes == graph.num_bytes
    captured(chain, max_bytes=graph.num_bytes)


def test_what_depends_on_numbers_is_refused_and_nothing_more_is_kept() -> None:
    x = torch.randn(5)
    for read in (
        lambda: x.sum().item(),
        lambda: x.tolist(),
        lambda: x.numpy(),
        lambda: bool(x.any()),
        lambda: x[x > 0],
        lambda: x.nonzero(),
        lambda: x.unique(),
    ):
        with pytest.raises(RuntimeError, match=r"depends on|reads numbers"):
            captured(read)
    graph = captured(lambda: rms_norm(x[None], x, 1e-5))
    rms_norm(x[None], x, 1e-5)
    assert len(graph.calls) == 1


@pytest.mark.parametrize(
    ("family", "dtype", "save", "chain"),
    [
        ("gemma2", "bfloat16", save_tiny_family, True),
        ("olmo3", "float32", save_tiny_family, False),
        ("qwen3_5", "bfloat16", save_tiny_hybrid, False),
    ],
)
def test_an_engine_with_graphs_and_one_without_give_the_same(
    family, dtype, save, chain, tmp_path
) -> None:
    """Prompts in pieces, decoding, chains and trees, windows, states of recurrent layers."""
    folder = save(tmp_path, family)
    options = {"dtype": dtype, "max_running": 5, "chunk_len": 7, "graph_bytes": 0}
    eager = RolloutEngine.from_pretrained(folder, "none", **options)
    assert eager.worker.target.graphs is None
    rollouts = eager.generate(PROMPTS, PARAMS)
    wanted = numbers(rollouts)
    truth = {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in rollouts}
    config = engine_config(folder, options | {"graph_bytes": 1 << 24})
    engine = RolloutEngine.from_config(
        config, oracle_factory(truth, size=6, right=0.7, chain=chain)
    )
    graphs = engine.worker.target.graphs.graph_runner
    for _ in range(3):
        assert numbers(engine.generate(PROMPTS, PARAMS)) == wanted
        engine.check_integrity()
    assert graphs.num_graphs > 4
    assert not graphs.failure
    engine.release_memory(["weights"])
    assert graphs.num_graphs == 0


def test_experts_whose_calls_depend_on_the_rows_go_without(tmp_path) -> None:
    engine = RolloutEngine.from_pretrained(save_tiny_deepseek(tmp_path, "deepseek_v3"), "none")
    assert engine.worker.target.graphs is None
