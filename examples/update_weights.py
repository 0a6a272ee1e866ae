"""The step of a trainer: new weights into the running engine, each token knows which made it.

python examples/update_weights.py [MODEL_FOLDER]
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct"
engine = RolloutEngine.from_pretrained(model, spec="ngram")
prompt = [{"role": "user", "content": "Write one sentence about the sea."}]
params = SamplingParams(temperature=0, max_new_tokens=30)


def show() -> None:
    (rollout,) = engine.generate([prompt], params)
    # Trainers recompute logprobs; the engine's own are the same bits.
    assert engine.score(rollout.prompt_ids, rollout.token_ids, params) == rollout.logprobs
    print(f"weight version {rollout.weight_versions[0]}: {rollout.text!r}")


show()
weights: dict[str, torch.Tensor] = {}
for file in sorted(Path(model).glob("*.safetensors")):
    weights |= load_file(file)
# In place of a training step: the final norm, a little off.
weights["model.norm.weight"] = weights["model.norm.weight"] * 0.9
engine.update_weights_from_tensor(list(weights.items()))
show()
