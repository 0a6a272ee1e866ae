#!/bin/sh
# GRPO with OpenRLHF's own trainer, rollouts by specrollout. Weights go over after every step.
#
#   sh examples/openrlhf_grpo.sh MODEL_FOLDER PROMPTS.jsonl REWARD.py [more arguments]
#
# PROMPTS.jsonl has "prompt" and "label"; REWARD.py a reward_func(queries, prompts, labels).
# All arguments: docs/openrlhf.md. Of one given twice the last counts.
set -eu
if [ $# -lt 3 ]; then
  echo "usage: $0 MODEL_FOLDER PROMPTS.jsonl REWARD.py [more arguments]" >&2
  exit 2
fi
model=$1 prompts=$2 reward=$3
shift 3

exec python -m rollout.trainers.openrlhf \
  --specrollout.spec ngram \
  --vllm.num_engines 1 \
  --vllm.enable_prefix_caching \
  --actor.model_name_or_path "$model" \
  --actor.num_nodes 1 \
  --actor.num_gpus_per_node 1 \
  --actor.adam.lr 1e-6 \
  --ds.zero_stage 3 \
  --ds.attn_implementation sdpa \
  --data.prompt_dataset "$prompts" \
  --data.input_key prompt \
  --data.label_key label \
  --data.max_len 1024 \
  --reward.remote_url "$reward" \
  --rollout.batch_size 16 \
  --rollout.n_samples_per_prompt 8 \
  --rollout.max_new_tokens 512 \
  --train.batch_size 128 \
  --algo.advantage.estimator group_norm \
  --algo.advantage.is_correction_level token \
  --algo.kl.init_coef 0 \
  "$@"
