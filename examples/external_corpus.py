"""Drafts from texts of one's own: loaded while the engine generates, visible in the speed alone.

python examples/external_corpus.py [MODEL_FOLDER]
"""

import sys

from rollout import Rollout, RolloutEngine, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct"
prompt = "one two three four five six"
params = SamplingParams(temperature=0, max_new_tokens=100)


def show(title: str, rollout: Rollout) -> None:
    num_tokens, num_forwards = len(rollout.token_ids), rollout.stats.verify_steps
    print(f"{title}: {num_tokens} tokens in {num_forwards} forwards of the model")


engine = RolloutEngine.from_pretrained(model, spec="ngram")
(plain,) = engine.generate([prompt], params)
show("without it", plain)

# What the model is likely to say: reference answers, the code base it works on, retrieved pages.
# In its own file, one JSON string or {"text": ...} per line: file_path="documents.jsonl".
documents = [prompt + (plain.text or "")]
engine = RolloutEngine.from_pretrained(model, spec="ngram")
engine.add_external_corpus("answers", documents=documents)  # returns at once
(answers,) = engine.wait_for_external_corpora()
print(f"{answers.name}: {answers.state}, {answers.num_tokens} tokens, {answers.num_bytes} bytes")

(drafted,) = engine.generate([prompt], params)
show("with it", drafted)
assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)

engine.remove_external_corpus("answers")
