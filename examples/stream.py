"""Each rollout as soon as it finishes, and the engine's counters.

python examples/stream.py [MODEL_FOLDER]
"""

import sys

from rollout import RolloutEngine, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct"
engine = RolloutEngine.from_pretrained(model, spec="ngram")

questions = ["What is the capital of France?", "Count from one to thirty.", "Say hello."]
prompts = [[{"role": "user", "content": question}] for question in questions]

for rollout in engine.stream(prompts, SamplingParams(temperature=0, max_new_tokens=80)):
    print(f"{questions[rollout.prompt_index]!r}: {rollout.text!r}")

metrics = engine.metrics()
print(
    f"{metrics.generated_tokens} tokens in {metrics.total_ms / 1e3:.1f} s, accept length "
    f"{metrics.accept_length:.2f}, {metrics.accepted} of {metrics.drafted} drafts accepted"
)
