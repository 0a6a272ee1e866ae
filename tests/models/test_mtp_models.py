import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import DType
from rollout.errors import CheckpointError
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.loader import load_model
from rollout.models.mtp.loader import MtpChain
from rollout.models.spec import ModelSpec, is_mtp_tensor
from tests.helpers.dense_attention import DenseAttention, features_of
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_mtp import LAYERS, VOCAB, E, names_of, plain_step, save_tiny_mtp

CPU = torch.device("cpu")
TOKENS = torch.randint(3, VOCAB, (2, 21), generator=torch.Generator().manual_seed(0))
LAYOUTS = ["mimo", "qwen3_next", "deepseek_v3"]


def load(folder, dtype=DType.float32):
    target = load_model(folder, dtype, CPU)
    chain = MtpChain.find(folder, ModelSpec.read(folder))
    return target, chain, chain.load(target)


def add(folder, tensors, remove=()):
    file = folder / "model.safetensors"
    stored = load_file(file) | tensors
    save_file({name: it for name, it in stored.items() if name not in remove}, file)


@torch.inference_mode()
def run_chain(steps, hidden, tokens):
    """Hidden states of every step over the whole sequence."""
    found = []
    for k, step in enumerate(steps):
        length = len(tokens) - k - 1
        attention = DenseAttention([length])
        hidden = step.forward(tokens[k + 1 :], hidden[:length], attention.positions, attention)
        found.append(hidden)
    return found


@pytest.mark.parametrize(
    ("layout", "num_steps"), [*((layout, 3) for layout in LAYOUTS), ("qwen3_next", 1)]
)
def test_a_chain_is_the_plain_one(layout, num_steps, tmp_path):
    folder = save_tiny_mtp(tmp_path, layout, num_steps)
    target, chain, steps = load(folder)
    assert len(steps) == chain.spec.num_steps == num_steps
    assert chain.spec.features == AuxHiddenStates(
        layers=(LAYERS,) if layout == "mimo" else (), final=layout != "mimo"
    )
    tensors = load_file(folder / "model.safetensors")
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    for tokens in TOKENS:
        features = features_of(target, chain.spec.features, tokens)
        plain = steps[0].fuse(features)
        for k, (step, ours) in enumerate(zip(steps, run_chain(steps, plain, tokens), strict=True)):
            length = len(tokens) - k - 1
            embedded = target.embed(tokens[k + 1 :])
            plain = plain_step(tensors, layout, k, embedded, plain[:length])
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(step.logits(ours), plain @ head.T, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_destinations_are_the_checkpoints_own_names(layout, tmp_path):
    folder = save_tiny_mtp(tmp_path, layout)
    _, _, steps = load(folder)
    stored = load_file(folder / "model.safetensors")
    found = [step.weight_loaders() for step in steps]
    names = {name for name in stored if is_mtp_tensor(name, LAYERS, 2)}
    assert {name for each in found for name in each} == names
    for each in found:
        for name, loader in each.items():
            assert torch.equal(loader.read(), stored[name]), name
    freed = [step.release() for step in steps]
    assert freed[0] >= freed[1] > 0
    assert (freed[0] > freed[1]) == (layout == "qwen3_next"), "what steps share is freed once"
    shared = set(found[0]) & set(found[1])
    assert len(shared) == (4 if layout == "qwen3_next" else 0)
    assert all(found[0][name].location == found[1][name].location for name in shared)


def test_copies_of_embedding_and_head_are_the_targets_and_others_the_chains(tmp_path):
    folder = save_tiny_mtp(tmp_path, "deepseek_v3")
    stored = load_file(folder / "model.safetensors")
    other = stored["lm_head.weight"].flip(0).contiguous()
    embedding, head = (
        f"model.layers.{{}}.{name}.weight" for name in ("embed_tokens", "shared_head.head")
    )
    copies = {
        embedding.format(2): stored["model.embed_tokens.weight"].clone(),
        embedding.format(3): stored["model.embed_tokens.weight"].flip(0).contiguous(),
        head.format(2): stored["lm_head.weight"].clone(),
        head.format(3): other,
    }
    add(folder, copies)
    target, _, steps = load(folder)
    assert not set(copies) & set(steps[0].weight_loaders())
    assert {embedding.format(3), head.format(3)} <= set(steps[1].weight_loaders())
    hidden = torch.randn(4, E)
    with torch.inference_mode():
        assert torch.equal(steps[0].logits(hidden), target.logits(hidden))
        torch.testing.assert_close(steps[1].logits(hidden), hidden @ other.T)


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ("deepseek_v3", "mlp.experts.0.gate_proj.weight"),
        ("mimo", "self_attn.attention_sink_bias"),
    ],
)
def test_what_is_not_implemented_is_named(layout, extra, tmp_path):
    name = f"{names_of(layout, 0)[-1]}.{extra}"
    folder = save_tiny_mtp(tmp_path, layout, extra={name: torch.zeros(4)})
    target = load_model(folder, DType.auto, CPU)  # it alone is served
    refused(f"unexpected: {name}", MtpChain.find(folder, target.spec).load, target)


def refused(match: str, call, *arguments) -> None:
    with pytest.raises(CheckpointError, match=match):
        call(*arguments)


def test_damaged_chains(tmp_path):
    folder = save_tiny_mtp(tmp_path, "mimo")
    spec, target = ModelSpec.read(folder), load_model(folder, DType.auto, CPU)
    norm = "model.mtp_layers.1.final_layernorm.weight"
    add(folder, {norm: torch.ones(E + 1)})
    refused(f"wrong shape: {norm}", MtpChain.find(folder, spec).load, target)
    add(folder, {}, remove=[norm])
    refused(f"missing: {norm}", MtpChain.find(folder, spec).load, target)
    plain = save_tiny_llama(tmp_path / "plain")
    refused(r"no MTP chain.*MiMo, Qwen3-Next \(Qwen3.5\), Deep", MtpChain.find, plain, spec)
