import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rollout.config import DType
from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.checkpoint import Checkpoint
from rollout.models.loader import load_model, resolve_device, resolve_dtype
from tests.helpers.dense_attention import logits_of
from tests.helpers.tiny_model import save_tiny_llama

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
PROMPTS = [[5, 9, 11, 3, 70], [1], [96, 0, 2]]


def load(folder, dtype=DType.auto, **options):
    return load_model(folder, dtype, CPU, **options)


@pytest.fixture
def folder(tmp_path):
    return save_tiny_llama(tmp_path / "model")


@pytest.fixture
def sharded(folder):
    """The same model in three shards."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(3):
        file = f"model-{shard + 1:05}-of-00003.safetensors"
        names = sorted(tensors)[shard::3]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def tie(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def fails(folder, *parts):
    with pytest.raises(CheckpointError) as error:
        load(folder)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_every_tensor_is_where_its_name_says(folder, dtype):
    model = load(folder, dtype)
    stored = load_file(folder / "model.safetensors")
    weight_loaders = model.weight_loaders()
    assert weight_loaders.keys() == stored.keys()
    for name, loader in weight_loaders.items():
        assert loader.shape == tuple(stored[name].shape)
        assert torch.equal(loader.read(), stored[name].to(model.dtype)), name


def test_a_sharded_checkpoint_is_the_same_model_and_its_progress_is_told(sharded, tmp_path):
    seen = []
    ours = load(sharded, progress=lambda done, total: seen.append((done, total)))
    total = Checkpoint(sharded).num_bytes
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    whole = load(save_tiny_llama(tmp_path / "whole"))
    for one, other in zip(logits_of(ours, PROMPTS), logits_of(whole, PROMPTS), strict=True):
        assert torch.equal(one, other)
    for name, tensor in Checkpoint(sharded):
        with safe_open(Checkpoint(sharded).tensors[name].file, framework="pt") as opened:
            assert torch.equal(tensor, opened.get_tensor(name))


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_either_name_of_a_tied_table_is_enough(folder, kept):
    tie(folder)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]

    def edit(tensors):
        del tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        tensors[kept] = table

    change(folder, edit)
    weight_loaders = load(folder).weight_loaders()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(weight_loaders[name].read(), table)
        assert weight_loaders[name].required == (name != "lm_head.weight")


def test_tied_names_must_agree(folder):
    tie(folder)
    fails(folder, "model.embed_tokens.weight", "lm_head.weight", "tie_word_embeddings")


def test_missing_files_are_named(folder, tmp_path):
    fails(tmp_path / "nowhere", "nowhere", "no such folder")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    fails(folder, "no .safetensors", "config.json, pytorch_model.bin", "pickle")
    (folder / "config.json").unlink()
    fails(folder, "config.json", "no such file")


def test_an_index_that_does_not_fit_its_shards(sharded):
    index = json.loads((sharded / INDEX).read_text())
    file = sharded / index["weight_map"][Q_PROJ]
    whole = file.read_bytes()
    tensors = load_file(file)
    del tensors[Q_PROJ]
    save_file(tensors, file)
    fails(sharded, file.name, Q_PROJ)
    file.write_bytes(whole[:-100])
    fails(sharded, file.name, "truncated")
    file.write_bytes(whole)
    for content in ("{}", '{"weight_map": {}}', '{"weight_map": []}', "{"):
        (sharded / INDEX).write_text(content)
        fails(sharded, INDEX)
    weight_map = {Q_PROJ: "../elsewhere.safetensors"}
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    fails(sharded, Q_PROJ, "../elsewhere.safetensors")
    (sharded / INDEX).unlink()
    fails(sharded, "3 safetensors files", INDEX)
    (sharded / INDEX).write_text(json.dumps(index))
    for shard in (2, 3):
        (sharded / f"model-{shard:05}-of-00003.safetensors").unlink()
    fails(sharded, "2 of 3 shards", "model-00002-of-00003", "model-00003-of-00003")


def test_tensors_that_do_not_fit_are_listed(folder):
    def edit(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
        tensors[Q_PROJ] = torch.zeros(48, 47)
        del tensors["model.norm.weight"]

    change(folder, edit)
    fails(
        folder,
        "missing: model.norm.weight",
        "unexpected: model.layers.0.self_attn.q_proj.bias",
        f"wrong shape: {Q_PROJ} is [48, 47], the model has [48, 48]",
    )
    change(folder, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int8)}))
    fails(folder, Q_PROJ, "I8")


def test_frequencies_of_old_checkpoints_are_passed_over(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    assert name not in load(folder).weight_loaders()


def test_a_damaged_file_is_called_what_it_is(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[:0], whole[:4], whole[:300], whole[:-1]):
        file.write_bytes(content)
        fails(folder, "model.safetensors", "truncated", f"{len(content)} bytes")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n")
    fails(folder, "Git LFS pointer")


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_dtype(monkeypatch):
    for requested, stored, device, features, resolved in (
        (DType.auto, BF16, "cpu", {"avx512_bf16"}, BF16),
        (DType.auto, BF16, "cpu", {"amx_bf16"}, BF16),
        (DType.auto, BF16, "cpu", {"avx512_f", "avx2"}, FP32),
        (DType.auto, FP16, "cpu", {"avx512_bf16"}, FP32),
        (DType.auto, FP16, "cpu", {"avx512_fp16"}, FP16),
        (DType.auto, FP32, "cpu", {"avx512_bf16"}, FP32),
        (DType.auto, torch.float64, "cpu", set(), FP32),
        (DType.auto, FP16, "cuda", set(), FP16),
        (DType.bfloat16, FP32, "cpu", set(), BF16),
        (DType.float32, BF16, "cuda", set(), FP32),
    ):
        found = frozenset(features)
        monkeypatch.setattr("rollout.models.loader.cpu_features", lambda found=found: found)
        assert resolve_dtype(requested, stored, torch.device(device)) == resolved, features


def test_device():
    assert resolve_device("cpu") == CPU
    assert resolve_device("cpu:0") == CPU
    assert resolve_device("auto").type in ("cpu", "cuda")
    for name in ("gpu", "cuda:99", "mps"):
        with pytest.raises(InvalidInputError, match=r"model\.device"):
            resolve_device(name)
