"""A trainer's exact forward: its logprobs are the rollout's, its gradients the ordinary model's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rollout import RolloutEngine, SamplingParams
from rollout.errors import InvalidInputError, UnsupportedModelError
from rollout.models.layers.rope import cos_sin_table
from rollout.models.spec import ModelSpec
from rollout.ops.paged_attention import AttentionVariant
from rollout.trainers import RolloutHook
from rollout.trainers.exact import exact_forward, token_logprobs
from rollout.trainers.exact import functions as exact_functions
from rollout.trainers.exact.attention import attend
from rollout.trainers.exact.layout import SequenceLayout
from tests.helpers.tiny_families import save_tiny_family

TEMPERATURE = 0.8
PROMPTS = [[5, 6, 7], [8, 9, 10, 11] * 9, [40], [5, 6, 7, 12]]
FAMILIES = ("llama biases", "qwen2", "qwen3", "gemma3", "mistral window", "qwen3 moe window")


@dataclass
class Case:
    folder: Path
    engine: RolloutEngine
    sequences: list[list[int]]  # prompts with their responses
    logprobs: list[list[float]]  # of the responses

    def model(self):
        return opened(self.folder, self.engine.worker.target.model_dtype)

    def batch(self, side: str) -> dict[str, torch.Tensor]:
        """All sequences, padded at a side or packed."""
        if side in ("packed", "cu_seq_lens"):
            positions = [torch.arange(len(tokens)) for tokens in self.sequences]
            ids = torch.tensor([list(chain(*self.sequences))])
            if side == "packed":
                return {"input_ids": ids, "position_ids": torch.cat(positions)[None]}
            ends = torch.tensor([0, *map(len, self.sequences)]).cumsum(0)
            return {"input_ids": ids, "cu_seq_lens_q": ends}
        longest = max(map(len, self.sequences))
        ids = torch.zeros(len(self.sequences), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(self.sequences):
            first = 0 if side == "right" else longest - len(tokens)
            ids[row, first : first + len(tokens)] = torch.tensor(tokens)
            mask[row, first : first + len(tokens)] = 1
        return {"input_ids": ids, "attention_mask": mask}

    def of_responses(self, values_BT: torch.Tensor, side: str) -> list[torch.Tensor]:
        """The values at the positions before each response's tokens."""
        if side in ("packed", "cu_seq_lens"):
            rows = values_BT[0].split([len(tokens) for tokens in self.sequences])
        else:
            lens = [len(tokens) for tokens in self.sequences]
            rows = [
                row[:length] if side == "right" else row[len(row) - length :]
                for row, length in zip(values_BT, lens, strict=True)
            ]
        return [row[-len(own) - 1 : -1] for row, own in zip(rows, self.logprobs, strict=True)]


def opened(folder: Path, dtype: torch.dtype = torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.config.use_cache = False
    return model


def make_case(folder: Path, dtype: str) -> Case:
    engine = RolloutEngine.from_pretrained(
        folder, spec="ngram", dtype=dtype, max_running=5, chunk_len=7,
        spec_options={"budget": "fixed", "calibration_seconds": 0},
    )  # fmt: skip
    sequences, logprobs = [], []
    for length in (9, 30):
        params = SamplingParams(
            temperature=TEMPERATURE, max_new_tokens=length, seed=3, n=2, ignore_eos=True
        )
        for rollout in engine.generate(PROMPTS, params):
            sequences.append(rollout.prompt_ids + rollout.token_ids)
            logprobs.append(rollout.logprobs)
    return Case(folder, engine, sequences, logprobs)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, dtype, tmp_path_factory) -> Case:
    folder = save_tiny_family(tmp_path_factory.mktemp("family"), request.param)
    return make_case(folder, dtype)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Case:
    return make_case(save_tiny_family(tmp_path_factory.mktemp("one"), "qwen3"), "float32")


def logprobs_of(model, batch) -> torch.Tensor:
    """Of each position's next token."""
    ids = batch["input_ids"]
    return token_logprobs(model(**batch).logits, ids.roll(-1, dims=1), TEMPERATURE)


@pytest.mark.parametrize("side", ["right", "left", "packed", "cu_seq_lens"])
def test_logprobs_are_the_rollouts_bit_for_bit(case, side) -> None:
    model = case.model()
    with exact_forward(model), torch.no_grad():
        found = case.of_responses(logprobs_of(model, case.batch(side)), side)
    for own, expected in zip(found, case.logprobs, strict=True):
        assert own.tolist() == expected


def test_a_tree_of_tokens_has_the_bits_of_its_sequences(case) -> None:
    parents, tokens, nodes, ids = [], [], [], {}
    for sequence in case.sequences:
        parent = -1
        for token in sequence:
            if (parent, token) not in ids:
                ids[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            parent = ids[parent, token]
        nodes.append(parent)
    mask = torch.eye(len(tokens), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    batch = {"input_ids": torch.tensor([tokens]), "position_ids": (mask.sum(1) - 1)[None]}
    model = case.model()
    with exact_forward(model), torch.no_grad():
        logits = model(**batch, attention_mask=mask[None, None]).logits[0]
    for sequence, node, expected in zip(case.sequences, nodes, case.logprobs, strict=True):
        path = mask[node].nonzero()[:, 0]
        found = token_logprobs(logits[path[:-1]], torch.tensor(sequence[1:]), TEMPERATURE)
        assert found[-len(expected) :].tolist() == expected


def test_a_perturbed_weight_shows(one) -> None:
    model = one.model()
    with torch.no_grad(), exact_forward(model):
        before = logprobs_of(model, one.batch("right"))
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
        after = logprobs_of(model, one.batch("right"))
    assert not torch.equal(before, after)


def test_routers_choose_what_they_chose_in_the_rollout(tmp_path) -> None:
    folder = save_tiny_family(tmp_path, "qwen3 moe window")
    engine = RolloutEngine.from_pretrained(folder, spec="none", record_routes=True)
    params = SamplingParams(max_new_tokens=20, seed=3, ignore_eos=True, routed_experts=True)
    (rollout,) = engine.generate([PROMPTS[1]], params)
    model, chosen = opened(folder), []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _, __, found: chosen.append(found[2]))
    with exact_forward(model), torch.no_grad():
        model(torch.tensor([rollout.prompt_ids + rollout.token_ids]))
    routes = torch.from_numpy(rollout.routed_experts)  # of all tokens but the last
    assert torch.equal(torch.stack(chosen, dim=1)[: len(routes)], routes.long())


class HiddenWrites(torch.optim.SGD):
    """Writes as DeepSpeed does: a parameter's version does not change."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


def test_after_a_step_they_are_those_of_the_updated_engine(one) -> None:
    model, batch = one.model(), one.batch("right")
    optimizer = HiddenWrites(model.parameters(), lr=0.1)
    with exact_forward(model):
        loss = -torch.cat(one.of_responses(logprobs_of(model, batch), "right")).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            found = one.of_responses(logprobs_of(model, batch), "right")
    one.engine.update_weights_from_tensor(model.named_parameters())
    for tokens, own, expected in zip(one.sequences, found, one.logprobs, strict=True):
        cut = len(tokens) - len(expected)
        scored = one.engine.score(
            tokens[:cut], tokens[cut:], SamplingParams(temperature=TEMPERATURE)
        )
        assert own.tolist() == scored != expected


def gradients(model, batch, *, exact: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, batch["input_ids"].numel()).view(batch["input_ids"].shape)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    if exact:
        with exact_forward(model):
            (logprobs_of(model, batch) * weights * mask).sum().backward()
    else:
        logits = model(**batch).logits / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(-1, batch["input_ids"].roll(-1, 1)[..., None])
        (logprobs[..., 0] * weights * mask).sum().backward()
    return {
        name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_ordinary_models(tmp_path, family) -> None:
    model = opened(save_tiny_family(tmp_path, family))
    ids = torch.randint(3, 97, (3, 90), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 60:] = mask[1, 80:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    expected = gradients(model, batch, exact=False)
    for name, found in gradients(model, batch, exact=True).items():
        error = (found - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, name


def test_adapters_are_merged_as_the_engine_gets_them(one) -> None:
    config = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_bias=False
    )
    model, batch = get_peft_model(one.model(), config), one.batch("right")
    expected = gradients(model, batch, exact=False)
    found = gradients(model, batch, exact=True)
    assert found.keys() == expected.keys() != set()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() < 1e-5 * expected[name].norm(), name
    optimizer = HiddenWrites([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with exact_forward(model):
        with torch.no_grad():
            before = logprobs_of(model, batch)
        optimizer.step()
        with torch.no_grad():
            logprobs = one.of_responses(logprobs_of(model, batch), "right")
            assert not torch.equal(before, logprobs_of(model, batch))
    RolloutHook(one.engine, model).sync()
    for tokens, own in zip(one.sequences, logprobs, strict=True):
        cut = len(tokens) - len(own)
        params = SamplingParams(temperature=TEMPERATURE)
        assert own.tolist() == one.engine.score(tokens[:cut], tokens[cut:], params)


def test_checkpointed_layers_have_the_same_gradients(one) -> None:
    model, batch = one.model(), one.batch("left")
    expected = gradients(model, batch, exact=True)
    model.gradient_checkpointing_enable()
    model.train()
    found = gradients(model, batch, exact=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "variant",
    [AttentionVariant(), AttentionVariant(window=5), AttentionVariant(window=5, soft_cap=1.5)],
)
def test_attentions_gradient_is_that_of_its_op(variant, monkeypatch) -> None:
    """In float64 by finite differences of the plain function, whose values are the op's."""
    generator = torch.Generator().manual_seed(0)
    layout = SequenceLayout.of(
        (2, 9), torch.tensor([[1] * 9, [0] * 4 + [1] * 5]), None, None, torch.device("cpu")
    )
    spec = ModelSpec.of({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1,
        "vocab_size": 9, "max_position_embeddings": 32, "eos_token_id": 2,
    })  # fmt: skip
    table = cos_sin_table(spec.rope, spec.rotary_dim, 32, torch.device("cpu"))
    q, k, v = (torch.randn(14, heads, 4, generator=generator) for heads in (4, 2, 2))
    op = attend(q, k, v, layout, table, 0.5, variant)
    monkeypatch.setattr(
        "rollout.trainers.exact.attention.exactly", lambda op, plain, *given: plain(*given)
    )
    plain = attend(q, k, v, layout, table, 0.5, variant)
    torch.testing.assert_close(op, plain, rtol=1e-5, atol=1e-5)
    wide = [each.double().requires_grad_() for each in (q, k, v)]

    def recomputed(*given):
        by_plain = lambda *own: attend(*own, layout, table, 0.5, variant)  # noqa: E731
        return exact_functions.exactly(by_plain, by_plain, *given)

    assert torch.autograd.gradcheck(recomputed, wide)


def test_a_batch_is_scored_in_inference_mode_and_trained_on_after_hidden_writes(one) -> None:
    model, batch = one.model(), one.batch("left")
    with exact_forward(model):
        with torch.inference_mode():
            before = logprobs_of(model, batch)
        for parameter in model.parameters():
            parameter.data.mul_(1.01)  # an EMA, a checkpoint that is loaded: no version counts it
        after = logprobs_of(model, batch)
        after.sum().backward()
    with exact_forward(model):
        assert torch.equal(logprobs_of(model, batch), after)
    assert not torch.equal(before, after)


def test_a_batch_of_padding_has_gradients_of_zero(one) -> None:
    model, batch = one.model(), one.batch("right")
    with exact_forward(model):
        logits = model(batch["input_ids"], torch.zeros_like(batch["input_ids"])).logits
        (logits * 0).sum().backward()
    assert not any(each.grad.any() for each in model.parameters() if each.grad is not None)


def test_it_is_undone_on_leaving(one) -> None:
    model, batch = one.model(), one.batch("right")
    with torch.no_grad():
        before = model(**batch).logits
        with pytest.raises(KeyError), exact_forward(model):
            raise KeyError
        assert torch.equal(model(**batch).logits, before)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_what_it_does_not_know_is_refused(tmp_path, one) -> None:
    other = AutoModelForCausalLM.from_pretrained(save_tiny_family(tmp_path, "phi3"))
    with pytest.raises(UnsupportedModelError, match="Phi3ForCausalLM is not one of"):
        exact_forward(other).__enter__()
    model = one.model()
    model.model.layers[0].mlp.extra = torch.nn.Tanh()
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mlp\.extra is a Tanh"):
        exact_forward(model).__enter__()
    model = one.model()
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(InvalidInputError, match="attention_dropout"):
        exact_forward(model).__enter__()
    capped = opened(save_tiny_family(tmp_path / "capped", "gemma3 capped"))
    with pytest.raises(UnsupportedModelError, match="final_logit_softcapping"):
        exact_forward(capped).__enter__()
    batch = one.batch("right")
    ids, mask = batch["input_ids"], batch["attention_mask"].clone()
    mask[0, 1] = 0
    later = torch.arange(3, 3 + ids.shape[1]).expand(ids.shape)
    model = one.model()
    with exact_forward(model):
        for arguments, match in (
            ({"attention_mask": mask}, "gaps"),
            ({"position_ids": later}, "from 0"),
            (
                {
                    **batch,
                    "position_ids": later - 2,
                },
                "from 0",
            ),
            ({"cu_seq_lens_q": torch.tensor([0, 4, 4, ids.numel()])}, "must go up"),
            ({"use_cache": True}, "use_cache=False"),
            ({"attention_mask": torch.ones(1, 1, 4, 4).bool()}, "attention_mask"),
        ):
            with pytest.raises(InvalidInputError, match=match):
                model(**{"input_ids": ids} | arguments)
        autocast = torch.autocast("cpu", torch.bfloat16)
        with autocast, pytest.raises(InvalidInputError, match="autocast"):
            model(**batch)
    logits, ids = torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long)
    for given, match in (
        ((logits, ids, -1.0), "temperature"), ((logits, ids - 100), "in .0, 3"),
        ((logits, ids[:, :1]), "shape"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=match):
            token_logprobs(*given)
