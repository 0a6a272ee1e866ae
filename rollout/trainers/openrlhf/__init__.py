"""OpenRLHF's own trainer with this engine in place of its vLLM engines.

``python -m rollout.trainers.openrlhf`` and the arguments of ``openrlhf.cli.train_ppo_ray``.
"""
