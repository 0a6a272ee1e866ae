"""Several samples of a few prompts, in prompt order.

python examples/generate.py [MODEL_FOLDER]
"""

import sys

from rollout import RolloutEngine, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct"
engine = RolloutEngine.from_pretrained(model, spec="ngram")

rollouts = engine.generate(
    [
        "The three primary colours are",  # text, as it stands
        [{"role": "user", "content": "Name three rivers of Europe."}],  # chat messages
    ],
    SamplingParams(temperature=0.7, max_new_tokens=40, seed=7, n=2),
)

for rollout in rollouts:
    mean_logprob = sum(rollout.logprobs) / len(rollout.logprobs)
    print(f"--- prompt {rollout.prompt_index}, sample {rollout.sample_index}:")
    print(rollout.text)
    print(
        f"({len(rollout.token_ids)} tokens, ended by {rollout.finish_reason.value}, mean logprob "
        f"{mean_logprob:.3f}, accept length {rollout.stats.accept_length:.2f})"
    )
