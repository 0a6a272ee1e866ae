"""Question: what can this device do, and is the engine bitwise exact on it? Bars: nothing differs.

    python benchmarks/gpu_smoke.py --json rows.jsonl

A session on a GPU begins with it. First the copy bandwidth and the rate of products in bfloat16,
which floors rest on. Then, in bfloat16: do rows of a product depend on how
many there are, and so on the tile; does attention depend on its company, and so on splits; does a
path of draft nodes read what plain decoding reads; does the sampler depend on the dtype of logits
or on other rows; do drafts, company or penalties of others change what an engine says.
"""

from __future__ import annotations

import argparse
import gc
import platform
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import bench_gpu_ops
import torch
from bench_gpu_ops import HEAD, D, H, K, V
from decoding import open_engine
from harness.command import Command, Part, Parts
from harness.roofline import Ceilings
from harness.rows import Row, not_run, row
from harness.shapes import Shape, config_folder
from op_case import Workload, make_plan, normal
from triton import TritonError
from triton import __version__ as triton_version

from rollout import RolloutEngine, RolloutError, SamplingParams
from rollout.ops.categorical import categorical
from rollout.ops.matmul import matmul
from rollout.ops.paged_attention import paged_attention

ROW_COUNTS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 72, 128, 129, 144, 256, 257, 288, 512, 1024, 2048)
MAX_ROWS = 2304
CONTEXTS = (100, 511, 2047, 16_383)
COMPANY = (2, 8, 64)
CHAIN = 8  # draft nodes
TOLERANCE = 0.01  # of bfloat16 beside float32

SMALL = Shape(
    hidden_size=512, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=128, ffn_size=1024,
    vocab_size=16,
)  # fmt: skip
"""So few tokens that random drafts are often right; attention is compiled as for the 8B shape."""

PARAMS = [
    SamplingParams(seed=1, max_new_tokens=60, ignore_eos=True),
    SamplingParams(seed=2, max_new_tokens=60, ignore_eos=True, top_p=0.9),
    SamplingParams(seed=3, max_new_tokens=60, ignore_eos=True, repetition_penalty=1.1),
    SamplingParams(seed=4, max_new_tokens=60, ignore_eos=True, temperature=0.0),
]

Check = Callable[[str], Iterator[Row]]  # of a device


def floors(device: str) -> Iterator[Row]:
    found = Ceilings.of(torch.device(device))
    yield row(f"copy bandwidth, {found.name}", found.bytes_per_second / 1e12, "TB/s")
    yield row(f"matrix products in bfloat16, {found.name}", found.flop_per_second / 1e12, "TFLOP/s")


def differing(name: str, count: int) -> Row:
    return row(f"bitwise, {name}", count, "differ", 0, at_most=True)


def products(device: str) -> Iterator[Row]:
    """Sums that cancel, so that what is left is rounding and a changed order shows."""
    small = {"small": (96, 64)}  # plain products of the CPU: their rows may differ
    for name, (outputs, inputs) in (
        bench_gpu_ops.products() if device == "cuda" else small
    ).items():
        most = 288 if name == HEAD else MAX_ROWS
        half_x, half_w = (normal(count, inputs // 2, device=device) for count in (most, outputs))
        x, w = torch.cat((half_x, half_x.flip(1)), 1), torch.cat((half_w, -half_w.flip(1)), 1)
        whole = matmul(x, w)
        counts = [count for count in ROW_COUNTS if count < most]
        wrong = sum(_rows_that_differ(matmul(x[-count:], w), whole[-count:]) for count in counts)
        yield differing(f"matmul {name}: rows, by how many there are", wrong)
        x = normal(72, inputs, device=device)
        exact = x.float() @ w.float().T
        error = (matmul(x, w).float() - exact).norm() / exact.norm()
        bar = TOLERANCE
        yield row(f"matmul {name}: relative error", float(error), "ratio", bar, at_most=True)


def attention(device: str) -> Iterator[Row]:
    for context in CONTEXTS if device == "cuda" else CONTEXTS[:2]:
        alone_q, slots = normal(1 + CHAIN, H, D, device=device), context + 1 + CHAIN
        keys, values = (normal(slots, K, D, device=device) for _ in "kv")

        def run(load: Workload, q: torch.Tensor, keys=keys, values=values) -> torch.Tensor:  # type: ignore[no-untyped-def]
            """Every request has the same keys by position, wherever they lie."""
            plan = make_plan(load, device)
            places = plan.req_to_token.long()
            pools = [torch.empty(places.numel(), K, D).to(q).fill_(torch.nan) for _ in "kv"]
            for pool, by_position in zip(pools, (keys, values), strict=True):
                pool[places] = by_position[: places.shape[1]]
            return paged_attention(q, pools[0], pools[1], plan, D**-0.5)

        def decode(start: int, requests: int = 1, run_len: int = 1, nodes: int = 0) -> Workload:
            return Workload(name="", requests=requests, start=start, run_len=run_len, nodes=nodes)

        plain = torch.cat([run(decode(context + i), alone_q[i : i + 1]) for i in range(1 + CHAIN)])
        label = f"attention at {context} keys"
        path = run(decode(context, nodes=CHAIN), alone_q)
        yield differing(f"{label}: nodes of a path, plain decoding", _rows_that_differ(path, plain))
        chunk = run(decode(context, run_len=1 + CHAIN), alone_q)
        yield differing(
            f"{label}: rows of a prefill, plain decoding", _rows_that_differ(chunk, plain)
        )
        wrong = [0, 0]
        for requests in COMPANY if context < 10_000 else COMPANY[:2]:
            beside = run(decode(context, requests), alone_q[:1].repeat(requests, 1, 1))
            wrong[0] += _rows_that_differ(beside, plain[:1].expand_as(beside))
            beside = run(decode(context, requests, nodes=CHAIN), alone_q.repeat(requests, 1, 1))
            wrong[1] += _rows_that_differ(beside, plain.repeat(requests, 1, 1))
        yield differing(f"{label}: rows in company, alone", wrong[0])
        yield differing(f"{label}: nodes in company, plain decoding", wrong[1])


def sampler(device: str) -> Iterator[Row]:
    rows, tokens = 72, V if device == "cuda" else 3000
    logits = normal(rows, tokens, device=device) * 3
    temperature = torch.linspace(0, 1.5, rows, device=device)
    uniform = torch.rand(rows, dtype=torch.float64, device=device)
    drawn = categorical(logits, temperature, uniform)
    for name, others in (
        ("float32, bfloat16 logits", categorical(logits.float(), temperature, uniform)),
        ("a row alone, in company", _row_by_row(logits, temperature, uniform)),
    ):
        wrong = sum(_rows_that_differ(*pair) for pair in zip(drawn, others, strict=True))
        yield differing(f"sampler: {name}", wrong)


def _row_by_row(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = zip(logits.split(1), temperature.split(1), uniform.split(1), strict=True)
    tokens, logprobs = zip(*(categorical(*each) for each in parts), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def engine(device: str) -> Iterator[Row]:
    """Steps with and without drafts, together and one by one: captured ones on a GPU."""
    said: dict[int, list[list[object]]] = {}  # by draft nodes: together, one by one
    with config_folder(SMALL) as folder:
        for nodes in (0, CHAIN):
            opened = open_engine(folder, len(PARAMS), 200, device=device, exact=True, nodes=nodes)
            every = range(len(PARAMS))
            _rollouts(opened, every)  # what comes again is captured
            alone = [rollout for index in every for rollout in _rollouts(opened, [index])]
            said[nodes] = [_rollouts(opened, every), alone]
            if nodes:
                accepted = opened.metrics().accepted
                yield row("engine: drafts accepted", accepted, "tokens", 1)
            opened.close()
            del opened
            gc.collect()
    plain = said[0][0]
    for name, others in (
        ("one by one, together", said[0][1]),
        ("with drafts, without", said[CHAIN][0]),
        ("with drafts one by one, without together", said[CHAIN][1]),
    ):
        wrong = sum(one != other for one, other in zip(others, plain, strict=True))
        yield differing(f"engine: rollouts {name}", wrong)


def _rollouts(opened: RolloutEngine, chosen: Sequence[int]) -> list[object]:
    """Tokens and logprobs of the requests with these of ``PARAMS``, which keep their seeds."""
    for index in chosen:
        opened.submit([index, *range(10)], PARAMS[index], prompt_index=index)
    ended = []
    while opened.has_unfinished:
        ended += opened.step()
    ended.sort(key=lambda rollout: rollout.prompt_index)
    return [(rollout.token_ids, rollout.logprobs) for rollout in ended]


def _rows_that_differ(one: torch.Tensor, other: torch.Tensor) -> int:
    """NaN is equal to nothing, so it differs."""
    return int((one != other).flatten(1).any(1).sum() if one.dim() > 1 else (one != other).sum())


CHECKS: dict[str, Check] = {
    "matmul": products, "attention": attention, "sampler": sampler, "engine": engine,
}  # fmt: skip


def checked(name: str, check: Check, device: str) -> Iterator[Row]:
    """A check that cannot be run costs no other."""
    try:
        with torch.inference_mode():
            yield from check(device)
    except (RuntimeError, RolloutError, TritonError):
        traceback.print_exc()
        yield not_run(f"bitwise, {name}", "differ", 0)


def print_versions() -> None:
    print("python", platform.python_version(), "torch", torch.__version__, "triton", triton_version)
    if torch.cuda.is_available():
        print(torch.cuda.get_device_properties(0), "CUDA", torch.version.cuda, flush=True)
        if shutil.which("nvidia-smi"):  # its clocks, power and whoever else is on it
            subprocess.run(["nvidia-smi"], check=False, timeout=30)


def parts(options: argparse.Namespace) -> Parts:
    print_versions()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Part] = {"floors": partial(floors, device)}
    for name, check in CHECKS.items():
        if device == "cuda" or check is not products:
            found[name] = partial(checked, name, check, device)
    return found


def make_command() -> Command:
    return Command(__doc__)


if __name__ == "__main__":
    make_command().run("smoke", parts)
