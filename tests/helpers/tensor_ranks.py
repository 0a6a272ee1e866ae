"""One of two tensor-parallel ranks: ``python -m tests.helpers.tensor_ranks out.json``.

As `launch` starts it, with the folders of its models in TENSOR_RANKS. Writes what each case gave,
by name; what is not the same on all ranks is under ``own``.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.rendezvous import rendezvous

from rollout import RolloutEngine, SamplingParams
from rollout.errors import RolloutError
from rollout.weights.checkpoint_source import CheckpointSource
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.group import WeightGroup
from rollout.weights.shared_memory import SharedMemorySender
from spec_workers import rank_agreement
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.ports import free_port
from tests.helpers.tensor_cases import FAMILIES, PARAMS, PROMPTS, changed, numbers, stored

RANK = int(os.environ["RANK"])
PARALLEL = {"mode": "tensor", "size": 2, "timeout": HANG_SECONDS, "check": True}


def engine_of(folder: str, spec: str = "none", **options) -> RolloutEngine:
    settings = {"kv_bytes": 1 << 20, "parallel": PARALLEL} | options
    return RolloutEngine.from_pretrained(folder, spec, **settings)


def rolled_out(engine: RolloutEngine) -> list:
    found = numbers(engine.generate(PROMPTS, PARAMS))
    engine.check_integrity()
    return found


def chain(folder: str, dtype: str = "float32") -> dict:
    """Whether chunks, company and drafts from the corpus leave the bits alone; what those are."""
    wanted = rolled_out(engine_of(folder, dtype=dtype, max_running=3, prefix_cache=False))
    options = {"budget": "fixed", "min_probability": 0.0}
    engine = engine_of(
        folder, "ngram", dtype=dtype, max_running=4, chunk_len=9, spec_options=options
    )
    same = {"ngram": rolled_out(engine) == wanted, "ngram again": rolled_out(engine) == wanted}
    return {"rollouts": wanted, "same": same, "accepted": engine.metrics().accepted}


def long_chain(folder: str, draft: str) -> dict:
    """Compare what `chain` does, and scores and drafts too."""
    found = chain(folder)
    wanted, same = found["rollouts"], found["same"]
    scored = [engine_of(folder).score(*wanted[index][:2], PARAMS) for index in (0, 1)]
    same["score"] = scored == [wanted[index][2] for index in (0, 1)]
    eagle = {"draft_path": draft, "budget": "fixed", "topk": 2, "num_steps": 3}
    learned = {"min_probability": 0.0, "calibration_seconds": 0.1}
    for spec, options in (("eagle", eagle), ("ngram", learned)):
        engine = engine_of(folder, spec, max_running=4, spec_options=options)
        same[f"{spec}, {options.get('budget', 'learned')}"] = rolled_out(engine) == wanted
    return found


def unlike_processors(folder: str) -> dict:
    """Rank 1 runs where only oneDNN multiplies few rows."""
    with pytest.MonkeyPatch.context() as patch:
        if RANK == 1:
            patch.setattr("rollout.ops.panel_matmul.native.supports", lambda *tensors: False)
        engine = engine_of(folder, dtype="bfloat16")
        return {"rows": engine.worker.target.minimum_rows, "rollouts": rolled_out(engine)}


def error_of(call, *args, **options) -> str:
    """The name of the error that a call raises, with its message if it is ours; empty without
    one."""
    try:
        call(*args, **options)
    except RolloutError as error:
        return f"{type(error).__name__}: {error}"
    except ZeroDivisionError as error:
        return type(error).__name__
    return ""


def sent(engine: RolloutEngine, folder: str) -> None:
    """An update through a weight group, whose sender is a thread of rank 0."""
    port = int(engine.worker.ranks.tensor.all_gather_text(str(free_port()))[0])
    source = CheckpointSource(folder)

    def send() -> None:
        group = WeightGroup(
            master_address="127.0.0.1", master_port=port, rank=0, world_size=3,
            group_name="weights", timeout=HANG_SECONDS,
        )  # fmt: skip
        DistributedSender(group, 8192).send(source)

    sender = threading.Thread(target=send, daemon=True)
    if RANK == 0:
        sender.start()
    engine.init_weights_update_group("127.0.0.1", port, 1, 3, "weights", timeout=HANG_SECONDS)
    specs = source.manifest()
    engine.update_weights_from_distributed(
        list(specs),
        [spec.dtype for spec in specs.values()],
        [spec.shape for spec in specs.values()],
        "weights",
        load_format="flattened_bucket",
    )
    if RANK == 0:
        sender.join(HANG_SECONDS)


def returned_early(engine: RolloutEngine, tensors: dict[str, torch.Tensor]) -> bool:
    """An update from shared memory that rank 1 begins to read late: whether rank 0's call had
    returned by then, after which a sender fills the memory anew."""
    note = Path(sys.argv[1]).with_name("returned")
    with SharedMemorySender(1 << 21, num_segments=1) as sender:
        handles = [json.dumps(handle) for handle in sender.handles(tensors.items())]
        (handle,) = map(json.loads, engine.worker.ranks.tensor.all_gather_text(handles[0])[:1])
        engine.begin_weight_update()
        deadline = time.monotonic() + RANK  # seconds, of rank 1 alone
        while time.monotonic() < deadline and not note.exists():
            time.sleep(0.01)
        early = note.exists()
        engine.update_weights_from_ipc(handle)
        note.touch()
        engine.end_weight_update()
    return early


def updates(folder: str, other: str) -> tuple[dict, dict]:
    engine = engine_of(folder)
    first = stored(folder)
    own, found = {}, {"before": engine.weights_digest()}
    new = changed(first)
    engine.update_weights_from_tensor(new)
    found["from tensors"] = engine.weights_digest()
    found["rollouts"] = rolled_out(engine)
    engine.update_weights_from_disk(other, weight_version=9)
    found["from disk"] = engine.weights_digest()
    found["version"] = engine.weight_version

    sent(engine, folder)
    found["sent"] = engine.weights_digest()
    engine.release_memory()
    engine.resume_memory()
    found["resumed"] = engine.weights_digest()
    own["returned early"] = returned_early(engine, first)
    found["from shared memory"] = engine.weights_digest()
    engine.update_weights_from_disk(other)

    name = "model.norm.weight"
    wrong = new | ({name: new[name][:-1]} if RANK else {})
    own["refused"] = error_of(engine.update_weights_from_tensor, wrong)
    found["serves"] = engine.can_run
    found["unchanged"] = engine.weights_digest()

    def stream():
        for index, pair in enumerate(first.items()):
            if RANK and index == 5:
                raise ZeroDivisionError
            yield pair

    own["torn"] = error_of(engine.update_weights_from_tensor, stream())
    own["why not"] = engine.unavailable_reason
    missing = str(Path(other) / "nowhere") if RANK else folder
    own["missing"] = error_of(engine.update_weights_from_disk, missing)
    engine.update_weights_from_disk(folder)
    found["healed"] = engine.weights_digest()
    return found, own


def corpora(folder: str) -> dict:
    """A corpus that is loaded at another time on each rank, and one that one rank cannot load."""
    engine = engine_of(folder, "ngram", spec_options={"min_probability": 0.0})
    chunks = [list(range(3, 90))] * 3
    engine.submit(PROMPTS[0], PARAMS)
    engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=200, ignore_eos=True))
    engine.add_external_corpus("late", token_chunks=chunks)
    loads = engine.worker.draft_corpus._loads
    if RANK:
        loads.wait("late")
    broken = [[3, 4], [10**6]] if RANK else [[3, 4]]
    engine.add_external_corpus("broken", token_chunks=broken)
    published = None
    for step in range(150):
        engine.step()
        states = {each.name: each.state for each in engine.worker.draft_corpus.external_corpora()}
        if states["late"] == "published" and published is None:
            published = step
        is_open = published is None or states["broken"] != "failed"
        if not any(
            engine.worker.ranks.tensor.all_gather_int(is_open)
        ):  # a rank sees its own failure first
            break
    waited = error_of(engine.add_external_corpus, "both", token_chunks=chunks, wait=True)
    states = [(each.name, each.state.value) for each in engine.external_corpora()]
    engine.close()
    return {"states": states, "waited": waited, "published": published}


def different_calls(folder: str) -> str:
    engine = engine_of(folder)
    engine.submit(PROMPTS[0], PARAMS)
    engine.step()
    engine.submit(PROMPTS[1 + RANK], PARAMS)
    return error_of(engine.step)


def failed_step(folder: str) -> dict:
    """Fail a step on rank 1 alone, when ranks have exchanged everything but their times."""
    engine = engine_of(folder)
    engine.submit(PROMPTS[0], PARAMS)
    engine.step()

    def fail(step):
        raise ZeroDivisionError

    if RANK:
        engine.worker.observe = fail
    return {"first": error_of(engine.step), "second": error_of(engine.step)}


def started_differently(folder: str, other: str) -> dict[str, str]:
    """What engines say that were not started alike on both ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_agreement, "version", lambda package: f"{package} 2.{RANK}")
        versions = error_of(engine_of, folder)
    return {
        "version": versions,
        "configuration": error_of(engine_of, folder, max_running=3 + RANK),
        "worker": error_of(engine_of, folder, "ngram" if RANK else "none"),
        "options": error_of(
            engine_of, folder, "ngram", spec_options={"num_draft_tokens": 3 + RANK}
        ),
        "model": error_of(engine_of, other if RANK else folder),
    }


def no_memory(folder: str) -> str:
    """Start with more KV than rank 1 can have."""
    gc.collect()  # what it frees later would be memory to have
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if RANK:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**27, limits[1]))
    try:
        engine_of(folder, kv_bytes=1 << 33, max_kv_tokens=1 << 21)
    except (RolloutError, RuntimeError, MemoryError) as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return ""


def lost(folder: str, end: Callable[[], None]) -> dict:
    """End rank 1 in the middle of an update, without a word."""
    engine = engine_of(folder)
    engine.generate(PROMPTS[:1], PARAMS)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(stored(folder).items()):
            if RANK and index == 5:
                end()
            yield pair

    found = {"update": error_of(engine.update_weights_from_tensor, stream())}
    found["serves"] = engine.can_run
    found["lost"] = error_of(engine.generate, PROMPTS, PARAMS)
    return found


def main(output: Path) -> None:
    torch.set_num_threads(1)
    # Of one engine after the other: the process that hosts the store, hosts it as long as this.
    store = next(iter(rendezvous("env://")))
    folders = json.loads(os.environ["TENSOR_RANKS"])
    llama, results, own = folders["llama"], {}, {}
    results["float32"] = long_chain(llama, folders["eagle"])
    results["bfloat16"] = chain(llama, "bfloat16")
    for name in ("tied", "one kv head", "hybrid", "interleaved", "experts", *FAMILIES):
        results[name] = chain(folders[name])
    results["unlike processors"] = unlike_processors(llama)
    results["updates"], own["updates"] = updates(llama, folders["other"])
    results["corpora"] = corpora(llama)
    own["different calls"] = different_calls(llama)
    own["failed step"] = failed_step(llama)
    own["different"] = started_differently(llama, folders["one kv head"])
    own["no memory"] = no_memory(llama)

    def end() -> None:
        output.write_text(json.dumps({**results, "own": own}))
        os._exit(0)

    own["lost"] = lost(llama, end)
    end()
    del store


if __name__ == "__main__":
    main(Path(sys.argv[1]))
