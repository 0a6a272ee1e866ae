"""Tree acceptance in plain torch, one entry and one node at a time."""

from __future__ import annotations

import torch


def accept(
    sampled_R: torch.Tensor,
    row_offsets_B1: torch.Tensor,
    tokens_N: torch.Tensor,
    parents_N: torch.Tensor,
    masks_N: torch.Tensor,
    node_offsets_B1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`accept` by parents alone; ``masks_N`` is for kernels that look at all nodes at once."""
    entries = len(row_offsets_B1) - 1
    paths_BD = torch.zeros(entries, 63, dtype=torch.int32, device=sampled_R.device)
    lengths_B = torch.zeros(entries, dtype=torch.int32, device=sampled_R.device)
    sampled, tokens, parents = sampled_R.tolist(), tokens_N.tolist(), parents_N.tolist()
    first_row, first_node = row_offsets_B1.tolist(), node_offsets_B1.tolist()
    for b in range(entries):
        path: list[int] = []
        at = 0
        for node in range(first_node[b], first_node[b + 1]):
            if parents[node] == at and tokens[node] == sampled[first_row[b] + at]:
                at = node - first_node[b] + 1
                path.append(at)
        paths_BD[b, : len(path)] = torch.tensor(path, dtype=torch.int32)
        lengths_B[b] = len(path)
    return paths_BD, lengths_B
