"""External corpora through the engine: loaded beside generation, seen in nothing but the speed."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import torch

from rollout import ExternalState, RolloutEngine, SamplingParams
from rollout.errors import InvalidInputError
from tests.helpers.compared import outcome
from tests.helpers.gated_list import GatedList
from tests.helpers.hang import HANG_SECONDS

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7, 12]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=40, seed=3, n=2, ignore_eos=True)


@pytest.fixture
def model(text_model_path: Path) -> str:
    return str(text_model_path)


def make_engine(model: str, spec: str = "ngram", **options) -> RolloutEngine:
    options = {} if spec == "none" else {"corpus_bytes": 1 << 20} | options
    return RolloutEngine.from_pretrained(
        model, spec, spec_options=options, max_running=4, num_threads=1
    )


@pytest.fixture
def engine(model: str) -> RolloutEngine:
    return make_engine(model)


def states(engine: RolloutEngine) -> dict[str, str]:
    return {each.name: each.state.value for each in engine.external_corpora()}


def test_documents_tokens_and_files_speed_up_the_same_rollouts(model: str, tmp_path: Path) -> None:
    plain = make_engine(model, "none").generate(PROMPTS, PARAMS)
    rollouts = [r.prompt_ids + r.token_ids for r in plain]
    fixed = {"budget": "fixed", "calibration_seconds": 0}  # a learned one goes by times
    cold = make_engine(model, **fixed)
    assert outcome(cold.generate(PROMPTS, PARAMS)) == outcome(plain)
    encoder = cold.encoder
    texts = [encoder.decode_with_specials(ids) for ids in rollouts]
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = ({"documents": texts}, {"token_chunks": rollouts}, {"file_path": file})
    for source in sources:
        engine = make_engine(model, **fixed)
        assert engine.add_external_corpus("answers", **source, wait=True) == "answers"
        (answers,) = engine.external_corpora()
        assert (answers.name, answers.state) == ("answers", ExternalState.PUBLISHED)
        assert answers.num_tokens == sum(map(len, rollouts))
        assert answers.num_bytes > 4 * answers.num_tokens
        assert (answers.progress, answers.error) == (1.0, None)
        assert engine.worker.counters()["corpus/external_corpora"] == 1
        assert outcome(engine.generate(PROMPTS, PARAMS)) == outcome(plain)
        assert engine.metrics().accept_length > cold.metrics().accept_length + 1


def test_appearing_and_vanishing_half_way_cannot_be_seen(model: str) -> None:
    engine = make_engine(model, budget="fixed", calibration_seconds=0)
    plain = make_engine(model, "none").generate(PROMPTS, PARAMS)
    chunks = [r.prompt_ids + r.token_ids for r in plain]
    requests = [
        engine.submit(prompt, PARAMS, prompt_index=p, sample_index=s)
        for p, prompt in enumerate(PROMPTS)
        for s in range(PARAMS.n)
    ]
    ended = {}

    def step() -> None:
        ended.update({r.request_id: r for r in engine.step()})

    for _ in range(3):
        step()
    engine.add_external_corpus("answers", token_chunks=chunks)
    engine.wait_for_external_corpora(
        HANG_SECONDS
    )  # between two steps: how many it would take is chance
    assert states(engine) == {"answers": "published"}
    assert not ended
    accepted = engine.metrics().accepted
    step()
    assert engine.metrics().accepted > accepted
    engine.remove_external_corpus("answers")
    assert engine.external_corpora() == []
    while engine.has_unfinished:
        step()
    assert outcome(ended[request.request_id] for request in requests) == outcome(plain)
    engine.check_integrity()


def test_corpora_that_come_and_go_at_random_cannot_be_seen(model: str) -> None:
    plain = make_engine(model, "none").generate(PROMPTS, PARAMS)
    chunks = [r.prompt_ids + r.token_ids for r in plain]
    rng, engine = random.Random(5), make_engine(model)
    names: list[str] = []
    rollouts = {}
    for _ in range(3):
        for p, prompt in enumerate(PROMPTS):
            for s in range(PARAMS.n):
                engine.submit(prompt, PARAMS, prompt_index=p, sample_index=s)
        while engine.has_unfinished:
            if names and rng.random() < 0.3:
                engine.remove_external_corpus(names.pop(rng.randrange(len(names))))
            elif rng.random() < 0.5:
                some = [*rng.choices(chunks, k=3), rng.choices(range(97), k=500)]
                names.append(engine.add_external_corpus(token_chunks=some))
            rollouts |= {(r.prompt_index, r.sample_index): r for r in engine.step()}
        assert outcome(rollouts[key] for key in sorted(rollouts)) == outcome(plain)
    assert {each.name for each in engine.wait_for_external_corpora(HANG_SECONDS)} == set(names)
    engine.worker.corpus.check_integrity()


def test_generation_goes_on_while_corpora_load(engine: RolloutEngine) -> None:
    first, second = GatedList([[1, 2]] * 4), GatedList([[3, 4]] * 4)
    engine.add_external_corpus("first", token_chunks=first)
    engine.add_external_corpus("second", token_chunks=second)
    assert first.reached.wait(HANG_SECONDS)
    assert second.reached.wait(HANG_SECONDS)  # several at once
    engine.generate(PROMPTS, PARAMS)
    assert states(engine) == {"first": "loading", "second": "loading"}
    assert all(0 <= each.progress < 1 for each in engine.external_corpora())
    assert engine.worker.counters()["corpus/external_loading"] == 2
    with pytest.raises(TimeoutError, match=r"after 0.05 s: first, second"):
        engine.wait_for_external_corpora(timeout=0.05)
    second.opened.set()
    while states(engine)["second"] == "loading":
        time.sleep(0.001)
    assert states(engine) == {"first": "loading", "second": "published"}
    first.opened.set()
    both = engine.wait_for_external_corpora(timeout=HANG_SECONDS)
    assert [(each.name, each.state.value, each.num_tokens) for each in both] == [
        ("first", "published", 8),
        ("second", "published", 8),
    ]


def test_on_request_it_is_drafted_from_when_it_is_asked_for(model: str) -> None:
    plain = make_engine(model, "none").generate(PROMPTS, PARAMS)
    chunks = [r.prompt_ids + r.token_ids for r in plain]
    engine = make_engine(model, budget="fixed", calibration_seconds=0)
    gated = GatedList(chunks)
    engine.add_external_corpus("answers", token_chunks=gated, publish="on_request")
    with pytest.raises(InvalidInputError, match="name='answers': is loading"):
        engine.publish_external_corpus("answers")
    gated.opened.set()
    engine.wait_for_external_corpora(HANG_SECONDS)
    engine.add_external_corpus("others", token_chunks=[[1]], publish="on_request", wait=True)
    assert outcome(engine.generate(PROMPTS, PARAMS)) == outcome(plain)
    cold = engine.metrics().accepted
    assert states(engine) == {"answers": "ready", "others": "ready"}
    engine.publish_external_corpus("answers")
    engine.publish_external_corpus("answers")  # it is
    assert outcome(engine.generate(PROMPTS, PARAMS)) == outcome(plain)
    assert engine.metrics().accepted - cold > cold + 20
    assert states(engine) == {"answers": "published", "others": "ready"}
    with pytest.raises(InvalidInputError, match=r"name='more': is unknown; there are answers, oth"):
        engine.publish_external_corpus("more")
    with pytest.raises(InvalidInputError, match="publish='soon': must be one of when_ready"):
        engine.add_external_corpus("more", token_chunks=[[1]], publish="soon")
    engine.add_external_corpus("bad", token_chunks=[[-1]], publish="on_request")
    engine.wait_for_external_corpora(HANG_SECONDS)
    with pytest.raises(InvalidInputError, match=r"name='bad': has failed: .*token_chunks"):
        engine.publish_external_corpus("bad")


def test_configured_ones_can_be_taken_from_it_before_they_begin(model: str, tmp_path) -> None:
    (tmp_path / "notes.jsonl").write_text('"one"')
    path = str(tmp_path / "notes.jsonl")
    engine = make_engine(model, external_corpora={"notes": path})
    assert engine.take_configured_corpora() == {"notes": path}
    assert engine.take_configured_corpora() == {}
    engine.generate(PROMPTS[:1], PARAMS)
    assert engine.external_corpora() == []
    assert make_engine(model, "none").take_configured_corpora() == {}


def test_a_load_is_cancelled_by_removing_it(engine: RolloutEngine) -> None:
    chunks = GatedList([[1, 2]] * 4)
    engine.add_external_corpus("notes", token_chunks=chunks)
    assert chunks.reached.wait(HANG_SECONDS)
    engine.remove_external_corpus("notes")
    assert engine.external_corpora() == []
    engine.add_external_corpus("notes", token_chunks=[[7, 8, 9]], wait=True)  # its name is free
    chunks.opened.set()
    engine.close()  # joins the thread
    (notes,) = engine.external_corpora()
    assert notes.num_tokens == 3
    with pytest.raises(InvalidInputError, match=r"^name='more': came after close"):
        engine.add_external_corpus("more", token_chunks=[[1]])


def test_a_bad_document_fails_its_load_alone(engine: RolloutEngine, tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text('"one two"\n{"text": 3}\n')
    engine.add_external_corpus("good", documents=["three four"])
    engine.add_external_corpus("bad", file_path=file)
    bad, good = engine.wait_for_external_corpora(timeout=HANG_SECONDS)
    assert (good.name, good.state) == ("good", ExternalState.PUBLISHED)
    assert (bad.name, bad.state) == ("bad", ExternalState.FAILED)
    assert bad.error is not None
    assert "notes.jsonl:2={'text': 3}: must be a JSON string" in bad.error
    assert engine.worker.counters()["corpus/external_failed"] == 1
    engine.generate(PROMPTS[:1], PARAMS)
    file.write_text('"one two"\n')
    engine.add_external_corpus("bad", file_path=file, wait=True)  # once it is mended
    engine.remove_external_corpus("bad")
    file.write_text("\n")
    with pytest.raises(InvalidInputError, match=r"name='bad': could not be loaded: .*at least one"):
        engine.add_external_corpus("bad", file_path=file, wait=True)
    assert states(engine) == {"good": "published"}


def test_a_quoted_document_is_quoted_as_it_is(engine: RolloutEngine, tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text('["max_tokens=3"]\n')
    with pytest.raises(InvalidInputError, match=r"jsonl:1=\['max_tokens=3'\]: must be a JSON"):
        engine.add_external_corpus("notes", file_path=tmp_path / "notes.jsonl", wait=True)


def test_limits_fail_the_load_and_name_the_option(model: str) -> None:
    for option, value in (("max_external_tokens", 10_000), ("max_external_bytes", 150_000)):
        engine = make_engine(model, **{option: value})
        for name in ("small", "smaller"):
            engine.add_external_corpus(name, token_chunks=[[1, 2, 3, 4]] * 25, wait=True)
        with pytest.raises(InvalidInputError, match=f"spec.{option}={value}"):
            engine.add_external_corpus(token_chunks=[[1, 2, 3, 4]] * 10_000, wait=True)
        assert states(engine) == {"small": "published", "smaller": "published"}


def test_names(engine: RolloutEngine) -> None:
    unnamed = [engine.add_external_corpus(token_chunks=[[1, 2]]) for _ in range(2)]
    assert len(set(unnamed)) == 2
    engine.add_external_corpus("a", token_chunks=[[1, 2]])
    for _ in range(2):  # loading, then published
        with pytest.raises(InvalidInputError, match="name='a': is taken"):
            engine.add_external_corpus("a", token_chunks=[[1, 2]])
        engine.wait_for_external_corpora(timeout=HANG_SECONDS)
    for name in ("", 3):
        with pytest.raises(InvalidInputError, match=f"name={name!r}: must be a text"):
            engine.add_external_corpus(name, token_chunks=[[1, 2]])
    with pytest.raises(InvalidInputError, match=r"name='.ud800': .*must be text that UTF-8"):
        engine.add_external_corpus("\ud800", token_chunks=[[1, 2]])
    with pytest.raises(InvalidInputError, match=r"name='b': is unknown; there are .*a"):
        engine.remove_external_corpus("b")
    with pytest.raises(InvalidInputError, match="give exactly one"):
        engine.add_external_corpus("c")
    assert len(engine.external_corpora()) == 3


def test_a_worker_without_a_corpus_says_which_has_one(model: str, tmp_path: Path) -> None:
    engine = make_engine(model, "none")
    calls = [
        lambda: engine.add_external_corpus(token_chunks=[[1]]),
        lambda: engine.remove_external_corpus("a"),
        lambda: engine.publish_external_corpus("a"),
        engine.external_corpora,
        engine.wait_for_external_corpora,
        lambda: engine.save_corpus(tmp_path / "corpus"),
        lambda: engine.load_corpus(tmp_path / "corpus"),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match=r"spec='PlainWorker': .*spec=ngram has one"):
            call()
    engine.close()


def test_configured_corpora_load_beside_the_first_steps(model: str, tmp_path: Path) -> None:
    code, notes = tmp_path / "code.jsonl", tmp_path / "notes.jsonl"
    code.write_text('"one two three"\n')
    notes.write_text("3\n")
    engine = make_engine(model, external_corpora={"code": str(code), "notes": notes})
    loaded, failed = engine.wait_for_external_corpora(timeout=HANG_SECONDS)
    assert (loaded.name, loaded.state, loaded.num_tokens) == ("code", "published", 3)
    assert (failed.name, failed.state) == ("notes", "failed")


def test_configured_corpora_begin_after_a_file_was_loaded(model: str, tmp_path: Path) -> None:
    """They replace the file's; the file needs the room for its own alone."""
    notes, file = tmp_path / "notes.jsonl", tmp_path / "corpus"
    notes.write_text(json.dumps("one two three " * 70_000))
    options = {"max_external_bytes": 4_500_000, "external_corpora": {"notes": str(notes)}}
    first = make_engine(model, **options)
    assert first.worker.counters()["corpus/external_loading"] == 0
    first.generate(PROMPTS, PARAMS)
    (saved,) = first.wait_for_external_corpora(timeout=HANG_SECONDS)
    assert saved.state is ExternalState.PUBLISHED
    first.save_corpus(file)
    notes.write_text(json.dumps("two three " * 100_000))  # it must be read again
    for second in (make_engine(model, **options), make_engine(model, corpus_path=file, **options)):
        second.load_corpus(file)
        assert second.worker.corpus.external_sizes()["notes"][0] == saved.num_tokens
        (read,) = second.wait_for_external_corpora(timeout=HANG_SECONDS)
        assert (read.state, read.num_tokens, read.error) == ("published", 200_000, None)
        second.close()


def test_closed_before_its_first_step_an_engine_loads_nothing(model: str, tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text('"one"')
    engine = make_engine(model, external_corpora={"notes": tmp_path / "notes.jsonl"})
    engine.close()
    engine.generate(PROMPTS[:1], PARAMS)
    assert engine.external_corpora() == []


def test_a_failed_corpus_that_a_file_brings_back_is_one(engine, tmp_path: Path) -> None:
    engine.add_external_corpus("notes", token_chunks=[[1, 2]], wait=True)
    engine.save_corpus(tmp_path / "corpus")
    engine.remove_external_corpus("notes")
    engine.add_external_corpus("notes", token_chunks=[[-1]])
    (failed,) = engine.wait_for_external_corpora(timeout=HANG_SECONDS)
    engine.load_corpus(tmp_path / "corpus")
    (notes,) = engine.external_corpora()
    assert (notes.state, notes.num_tokens) == ("published", 2)
    assert failed.error
    assert notes.error == failed.error
    engine.remove_external_corpus("notes")
    assert engine.external_corpora() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"external_corpora": ["a"]}, r"spec.external_corpora=\['a'\]: must map names to JSONL"),
        ({"external_corpora": {"a": 3}}, r"spec.external_corpora.a=3: must be the path of a JSONL"),
        ({"external_corpora": {"a": "no"}}, r"spec.external_corpora.a='no': there is no such file"),
        (
            {"external_corpora": {"\ud800": __file__}},
            r"spec.external_corpora='.ud800': .*must be text that UTF-8 can encode",
        ),
        ({"external_corpora": {"": __file__}}, r"spec.external_corpora='': must be a text"),
        ({"max_external_bytes": 0}, r"spec.max_external_bytes=0: must be an integer >= 1"),
        ({"max_external_bytes": True}, r"spec.max_external_bytes=True: must be an integer >= 1"),
        ({"max_external_bytes": 1 << 62}, r"^spec.max_external_bytes=\d+: must be in \[0, "),
        ({"max_external_tokens": True}, r"spec.max_external_tokens=True: must be an integer"),
        ({"corpus_bytes": 1 << 62}, r"^spec.corpus_bytes=\d+: must be in \[0, "),
        ({"corpus_bytes": True}, r"^spec.corpus_bytes=True: must be an integer"),
        ({"max_external_tokens": 1.5}, r"spec.max_external_tokens=1.5: must be an integer >= 1"),
        ({"corpus_bytes": 1}, r"spec.corpus_bytes=1: must be >= "),
        ({"corpus_path": "no"}, r"spec.corpus_path='no': there is no such file"),
        ({"corpus_path": __file__}, r"spec.corpus_path='.*': the file is not a saved n-gram corpu"),
    ],
)
def test_wrong_options_are_named(model: str, options: dict, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_engine(model, **options)


def test_a_saved_corpus_goes_on_where_it_was(model: str, tmp_path: Path) -> None:
    """An engine that was never stopped, and one started from its file, draft the same."""
    first, file = make_engine(model, budget="fixed"), tmp_path / "corpus"
    first.add_external_corpus("notes", token_chunks=[[5, 6, 7, 8]], wait=True)
    first.generate(PROMPTS[:2], PARAMS)
    first.save_corpus(file)
    loaded, begun = (
        make_engine(model, budget="fixed"),
        make_engine(model, budget="fixed", corpus_path=str(file)),
    )
    loaded.generate(PROMPTS[2:], PARAMS)  # is forgotten
    loaded.load_corpus(file)
    fresh = make_engine(model, budget="fixed")
    for engine in (first, loaded, begun, fresh):
        engine.flush_cache()  # cached prefixes would let requests in at other steps
        engine.reset_metrics()
        engine.generate(PROMPTS, PARAMS)
    drafts = [
        (m.drafted, m.accepted, m.steps)
        for m in (each.metrics() for each in (first, loaded, begun, fresh))
    ]
    assert drafts[0] == drafts[1] == drafts[2]
    assert drafts[0][1] > drafts[3][1]
    assert states(loaded) == states(begun) == {"notes": "published"}


def test_a_loaded_corpus_is_told_of_the_weights_in_use(model: str, tmp_path: Path) -> None:
    engine = make_engine(model)
    weights = [("model.norm.weight", torch.ones(48))]
    engine.update_weights_from_tensor(weights, weight_version=7, partial=True)
    engine.generate(PROMPTS, PARAMS)
    engine.save_corpus(tmp_path / "corpus")
    for version in (7, 0):
        fresh = make_engine(model)
        if version:
            fresh.update_weights_from_tensor(weights, weight_version=version, partial=True)
        fresh.load_corpus(tmp_path / "corpus")
        assert fresh.worker.counters()["corpus/weight_version"] == 7
        fresh.generate(PROMPTS, PARAMS)
        assert fresh.worker.counters()["corpus/weight_version"] == version


def test_a_file_that_does_not_fit_changes_nothing(
    model: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    engine, file = make_engine(model), tmp_path / "corpus"
    engine.generate(PROMPTS, PARAMS)
    engine.save_corpus(file)
    num_tokens = engine.worker.draft_corpus.num_tokens
    (tmp_path / "torn").write_bytes(file.read_bytes()[:-9])
    make_engine(model, corpus_bytes=2 << 20).save_corpus(tmp_path / "larger")
    for name, message in (("torn", "damaged|truncated"), ("larger", "spec.corpus_bytes=2097152")):
        with pytest.raises(InvalidInputError, match=f"^path='[^']*{name}': the file .*({message})"):
            engine.load_corpus(tmp_path / name)
    with pytest.raises(OSError, match="nowhere"):
        engine.load_corpus(tmp_path / "nowhere")
    with pytest.raises(OSError, match="nowhere"):
        engine.save_corpus(tmp_path / "nowhere" / "corpus")
    assert engine.worker.draft_corpus.num_tokens == num_tokens


def test_a_file_without_room_names_the_option(engine, model: str, tmp_path: Path) -> None:
    engine.add_external_corpus("notes", token_chunks=[[1, 2] * 50_000], wait=True)
    engine.save_corpus(tmp_path / "corpus")
    small = make_engine(model, max_external_bytes=1 << 18)
    with pytest.raises(InvalidInputError, match=r"spec.max_external_bytes=262144: is too small"):
        small.load_corpus(tmp_path / "corpus")


def test_what_loads_replaces_what_a_file_holds_under_its_name(engine, tmp_path: Path) -> None:
    engine.add_external_corpus("notes", token_chunks=[[1, 2]], wait=True)
    engine.add_external_corpus("code", token_chunks=[[3]], wait=True)
    engine.save_corpus(tmp_path / "corpus")
    engine.remove_external_corpus("notes")
    engine.remove_external_corpus("code")
    newer = GatedList([[4, 5, 6], [7]])
    engine.add_external_corpus("notes", token_chunks=newer)
    engine.load_corpus(tmp_path / "corpus")
    assert states(engine) == {"code": "published", "notes": "loading"}
    newer.opened.set()
    code, notes = engine.wait_for_external_corpora(timeout=HANG_SECONDS)
    assert (code.num_tokens, notes.num_tokens) == (1, 4)
    assert notes.state is ExternalState.PUBLISHED
