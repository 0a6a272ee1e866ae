"""External corpora through the engine: loaded beside generation, seen in nothing but the speed."""

from __future__ import annotations

import json

import pytest
import torch

from rollout import ExternalState, RolloutEngine, SamplingParams
from rollout.errors import InvalidInputError
from tests.helpers.compared import outcome
from tests.helpers.gated_list import GatedList
from tests.helpers.hang import HANG_SECONDS

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7, 12]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=40, seed=3, n=2, ignore_eos=True)


FIXED = {"budget": "fixed", "calibration_seconds": 0}  # a learned one goes by times


@pytest.fixture
def model(text_model_path):
    return str(text_model_path)


def make_engine(model: str, spec: str = "ngram", **options) -> RolloutEngine:
    options = {} if spec == "none" else {"corpus_bytes": 1 << 20} | options
    return RolloutEngine.from_pretrained(
        model, spec, spec_options=options, max_running=4, num_threads=1
    )


@pytest.fixture
def engine(model):
    return make_engine(model)


def states(engine: RolloutEngine) -> dict[str, str]:
    return {each.name: each.state.value for each in engine.external_corpora()}


def test_documents_tokens_and_files_speed_up_the_same_rollouts(model, tmp_path):
    plain = make_engine(model, "none").generate(PROMPTS, PARAMS)
    rollouts = [r.prompt_ids + r.token_ids for r in plain]
    cold = make_engine(model, **FIXED)
    assert outcome(cold.generate(PROMPTS, PARAMS)) == outcome(plain)
    texts = [cold.encoder.decode_with_specials(ids) for ids in rollouts]
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for source in ({"documents": texts}, {"token_chunks": rollouts}, {"file_path": file}):
        engine = make_engine(model, **FIXED)
        assert engine.add_external_corpus("answers", **source, wait=True) == "answers"
        (answers,) = engine.external_corpora()
        assert (answers.name, answers.state) == ("answers", ExternalState.PUBLISHED)
        assert answers.num_tokens == sum(map(len, rollouts))
        assert (answers.progress, answers.error) == (1.0, None)
        assert engine.worker.counters()["corpus/external_corpora"] == 1
        assert outcome(engine.generate(PROMPTS, PARAMS)) == outcome(plain)
        assert engine.metrics().accept_length > cold.metrics().accept_length + 1


def test_appearing_and_vanishing_half_way_cannot_be_seen(model):
    engine = make_engine(model, **FIXED)
    plain = make_engine(model, "none").generate(PROMPTS, PARAMS)
    chunks = [r.prompt_ids + r.token_ids for r in plain]
    requests = [
        engine.submit(prompt, PARAMS, prompt_index=p, sample_index=s)
        for p, prompt in enumerate(PROMPTS)
        for s in range(PARAMS.n)
    ]
    ended = {}

    def step():
        ended.update({r.request_id: r for r in engine.step()})

    for _ in range(3):
        step()
    engine.add_external_corpus("answers", token_chunks=chunks)
    engine.wait_for_external_corpora(HANG_SECONDS)  # else chance says after which step
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


def test_on_request_it_is_drafted_from_when_it_is_asked_for(model):
    plain = make_engine(model, "none").generate(PROMPTS, PARAMS)
    engine = make_engine(model, **FIXED)
    gated = GatedList([r.prompt_ids + r.token_ids for r in plain])
    engine.add_external_corpus("answers", token_chunks=gated, publish="on_request")
    assert gated.reached.wait(HANG_SECONDS)
    assert outcome(engine.generate(PROMPTS, PARAMS)) == outcome(plain)  # while it loads
    (loading,) = engine.external_corpora()
    assert loading.state is ExternalState.LOADING
    assert 0 <= loading.progress < 1
    with pytest.raises(InvalidInputError, match="name='answers': is loading"):
        engine.publish_external_corpus("answers")
    with pytest.raises(TimeoutError, match=r"after 0.01 s: answers"):
        engine.wait_for_external_corpora(timeout=0.01)
    gated.opened.set()
    engine.wait_for_external_corpora(HANG_SECONDS)
    assert states(engine) == {"answers": "ready"}
    before = engine.metrics().accepted
    engine.generate(PROMPTS, PARAMS)
    cold = engine.metrics().accepted - before
    for _ in range(2):  # the second time it is
        engine.publish_external_corpus("answers")
    before = engine.metrics().accepted
    assert outcome(engine.generate(PROMPTS, PARAMS)) == outcome(plain)
    assert engine.metrics().accepted - before > cold
    assert states(engine) == {"answers": "published"}
    engine.add_external_corpus("bad", token_chunks=[[-1]], publish="on_request")
    engine.wait_for_external_corpora(HANG_SECONDS)
    with pytest.raises(InvalidInputError, match=r"name='bad': has failed: .*token_chunks"):
        engine.publish_external_corpus("bad")


def test_names_and_sources_are_refused(engine):
    unnamed = [engine.add_external_corpus(token_chunks=[[1, 2]]) for _ in range(2)]
    assert len(set(unnamed)) == 2
    engine.add_external_corpus("a", token_chunks=[[1, 2]])
    for _ in range(2):  # loading, then published
        with pytest.raises(InvalidInputError, match="name='a': is taken"):
            engine.add_external_corpus("a", token_chunks=[[1, 2]])
        engine.wait_for_external_corpora(timeout=HANG_SECONDS)
    with pytest.raises(InvalidInputError, match=r"^name=.*must be"):
        engine.add_external_corpus("", token_chunks=[[1, 2]])
    for call in (engine.remove_external_corpus, engine.publish_external_corpus):
        with pytest.raises(InvalidInputError, match=r"name='b': is unknown; there are .*a"):
            call("b")
    with pytest.raises(InvalidInputError, match="give exactly one"):
        engine.add_external_corpus("c")
    with pytest.raises(InvalidInputError, match="publish='soon': must be one of when_ready"):
        engine.add_external_corpus("c", token_chunks=[[1]], publish="soon")
    with pytest.raises(InvalidInputError, match="timeout=-1: must be a number of seconds"):
        engine.wait_for_external_corpora(timeout=-1)
    assert len(engine.external_corpora()) == 3
    engine.close()
    with pytest.raises(InvalidInputError, match=r"^name='c': came after close"):
        engine.add_external_corpus("c", token_chunks=[[1]])


def test_a_worker_without_a_corpus_says_which_has_one(model, tmp_path):
    engine = make_engine(model, "none")
    for call in (engine.external_corpora, lambda: engine.save_corpus(tmp_path / "corpus")):
        with pytest.raises(InvalidInputError, match=r"spec='PlainWorker': .*spec=ngram has one"):
            call()
    engine.close()


def test_configured_corpora_load_beside_the_first_steps(model, tmp_path):
    code, notes = tmp_path / "code.jsonl", tmp_path / "notes.jsonl"
    code.write_text('"one two three"\n')
    notes.write_text("3\n")
    files = {"code": str(code), "notes": str(notes)}
    engine = make_engine(model, external_corpora=files)
    loaded, failed = engine.wait_for_external_corpora(timeout=HANG_SECONDS)
    assert (loaded.name, loaded.state, loaded.num_tokens) == ("code", "published", 3)
    assert (failed.name, failed.state) == ("notes", "failed")
    closed = make_engine(model, external_corpora=files)
    closed.close()
    closed.generate(PROMPTS[:1], PARAMS)
    assert closed.external_corpora() == []


def test_a_saved_corpus_goes_on_where_it_was(model, tmp_path):
    """An engine that was never stopped, and one started from its file, draft the same."""
    first, file = make_engine(model, budget="fixed"), tmp_path / "corpus"
    first.add_external_corpus("notes", token_chunks=[[5, 6, 7, 8]], wait=True)
    first.generate(PROMPTS[:2], PARAMS)
    first.save_corpus(file)
    begun = make_engine(model, budget="fixed", corpus_path=str(file))
    loaded, fresh = (make_engine(model, budget="fixed") for _ in range(2))
    loaded.generate(PROMPTS[2:], PARAMS)  # is forgotten
    loaded.load_corpus(file)
    drafts = []
    for engine in (first, loaded, begun, fresh):
        engine.flush_cache()  # cached prefixes would let requests in at other steps
        engine.reset_metrics()
        engine.generate(PROMPTS, PARAMS)
        metrics = engine.metrics()
        drafts.append((metrics.drafted, metrics.accepted, metrics.steps))
    assert drafts[0] == drafts[1] == drafts[2]
    assert drafts[0][1] > drafts[3][1]
    assert states(loaded) == states(begun) == {"notes": "published"}


def test_a_loaded_corpus_is_told_of_the_weights_in_use(model, tmp_path):
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


def test_a_file_that_does_not_fit_changes_nothing(engine, model, tmp_path):
    file = tmp_path / "corpus"
    engine.generate(PROMPTS, PARAMS)
    engine.add_external_corpus("notes", token_chunks=[[1, 2] * 50_000], wait=True)
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
    small = make_engine(model, max_external_bytes=1 << 18)
    with pytest.raises(InvalidInputError, match=r"spec.max_external_bytes=262144: is too small"):
        small.load_corpus(file)
