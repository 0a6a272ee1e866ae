"""Flags and words of a command, as the keys that they stand for."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from rollout.config import KEY_OF
from rollout.errors import InvalidInputError
from rollout.offline import RunConfig
from rollout.offline.command_line import (
    hydra_arguments,
    key_hint,
    keys_of,
    take_flags,
    words_as_overrides,
)
from rollout.server.config import ServeConfig

JOBS = (
    ("my/model prompts.jsonl", "model.path='my/model' data.path='prompts.jsonl'"),
    ("--n 4 org/name p.jsonl exact=false",
     "model.path='org/name' data.path='p.jsonl' exact=false sampling.n=4"),
    ("/runs/step=9 p.jsonl", "model.path='/runs/step=9' data.path='p.jsonl'"),
    ("model=runs/step=9 --seed=-3", "model.path='runs/step=9' sampling.seed=-3"),
    ("-m m/m --top-p 0.6,1.0", "-m model.path='m/m' sampling.top_p=0.6,1.0"),
    ("--cfg job m/m num_threads=2", "--cfg job model.path='m/m' num_threads=2"),
    ("~spec +a.b=1 spec=none", "~spec +a.b=1 spec=none"),
    ("--max-tokens 8 --min_tokens 2", "sampling.max_new_tokens=8 sampling.min_new_tokens=2"),
    ("--spec hybrid --dtype bfloat16", "spec=hybrid model.dtype=bfloat16"),
)  # fmt: skip
SERVERS = (
    ("m/m --host ::1 --port 8000", "model.path='m/m' server.host='::1' server.port=8000"),
    ("--model m/m --served-model-name it", "model.path='m/m' server.model_name='it'"),
    ("m/m --api-key=abc== --seed 3", "model.path='m/m' server.api_key='abc==' server.seed=3"),
    ("m/m --tensor-parallel-size 2", "model.path='m/m' parallel=tensor parallel.size=2"),
    ("m/m --tensor-parallel-size 1 --dp-size 3", "model.path='m/m' cluster=ray cluster.replicas=3"),
    ("m/m --max-model-len 4096", "model.path='m/m' model.max_context_len=4096"),
    ("m/m --max-num-seqs 8", "model.path='m/m' scheduler.max_running=8"),
)


def test_flags_and_words_are_keys():
    for kind, table in ((RunConfig, JOBS), (ServeConfig, SERVERS)):
        for given, overrides in table:
            assert hydra_arguments(given.split(), kind) == overrides.split(), given


REFUSED = (
    ("m/m p.jsonl more", "arguments='more': must be KEY=VALUE"),
    ("m/m --mem-fraction-static=0.9",
     "arguments='--mem-fraction-static=0.9': no such flag, did you mean memory.kv_fraction?"),
    ("--temprature=1",
     "arguments='--temprature=1': no such flag, did you mean sampling.temperature?"),
    ("--port 3", "arguments='--port': no such flag"),  # of a server
    ("--seed", "--seed=None: expected one argument"),
)  # fmt: skip
HINTS = (
    ("sampling.max_tokens", "sampling.max_new_tokens"),
    ("temperature", "sampling.temperature"),
    ("samplng.n", "sampling.n"),
    ("tensor_parallel_size", "parallel=tensor parallel.size"),
    ("model.max_model_len", "model.max_context_len"),
    ("spek", "spec"),
)


TEXTS = ("12e45678", "null", "a,b", "true", "'", "it's\\", "${x}", "\\${x}", " [", "{a: 1}", "=")


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_reaches_its_key_as_it_was_typed(text):
    overrides, _ = take_flags([f"--api-key={text}"], ServeConfig)
    overrides += words_as_overrides([text], ServeConfig) if "=" not in text else []
    parsed = OverridesParser.create().parse_overrides(overrides)
    for each in parsed:
        key = each.key_or_group
        config = OmegaConf.create({key: each.value()})
        assert OmegaConf.to_container(config, resolve=True) == {key: text}


def test_what_is_like_a_key_is_named():
    for given, message in REFUSED:
        with pytest.raises(InvalidInputError) as refused:
            hydra_arguments(given.split(), RunConfig)
        assert str(refused.value).startswith(message), given
    for given, key in HINTS:
        assert key_hint(given, RunConfig) == f", did you mean {key}?"
    assert key_hint("server.prot", ServeConfig) == ", did you mean server.port?"
    assert key_hint("nothing.like.it", RunConfig) == ""


def test_other_engines_names_stand_for_keys_that_exist():
    assert set(KEY_OF.values()) <= set(keys_of(ServeConfig))
    flags = [f"--{name}=1" for name in KEY_OF if "fraction" not in KEY_OF[name]]
    assert take_flags(flags, ServeConfig)[1] == []
