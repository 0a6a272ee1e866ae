"""Token sequences as one tree, so that a trainer computes what they share only once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.trainers.exact import token_logprobs


class TokenTree:
    """Sequences laid out as one: a node for each token that differs in what comes before it.

    The examples that begin every prompt, the prompt that the samples of a group share, and the
    beginnings those samples have in common are one row of the forward each. Logprobs and gradients
    are those of the separate sequences, up to rounding.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []  # -1: a first token
        self.paths: list[list[int]] = []  # the nodes of each sequence, in order
        node_of: dict[tuple[int, int], int] = {}  # by parent and token
        for sequence in sequences:
            path: list[int] = []
            parent = -1
            for token in sequence:
                node = node_of.setdefault((parent, token), len(self._tokens))
                if node == len(self._tokens):
                    self._tokens.append(token)
                    self._parents.append(parent)
                path.append(node)
                parent = node
            self.paths.append(path)

    @property
    def num_nodes(self) -> int:
        return len(self._tokens)

    def logprobs(
        self,
        model: torch.nn.Module,
        nodes: Sequence[int],
        temperature: float = 1.0,
        *,
        exact: bool = False,
    ) -> torch.Tensor:
        """Logprob of the token at each of ``nodes``, given the tokens on the way to it.

        ``model`` is a transformers causal language model, or one wrapped. None of ``nodes``, N of
        them, is a first token. ``exact``: within `exact_forward`, the engine's logprobs. Returns
        float32 [N], with gradients.
        """
        mask_TT = torch.eye(self.num_nodes, dtype=torch.bool)
        positions_T = torch.zeros(self.num_nodes, dtype=torch.long)
        for node, parent in enumerate(self._parents):
            if parent >= 0:
                mask_TT[node] |= mask_TT[parent]
                positions_T[node] = positions_T[parent] + 1
        parents_N = torch.tensor([self._parents[node] for node in nodes])
        rows_R, row_of_N = parents_N.unique(return_inverse=True)
        logits_RV = model(
            input_ids=torch.tensor([self._tokens]),
            attention_mask=mask_TT[None, None],  # four dimensions: taken as it is
            position_ids=positions_T[None],
            logits_to_keep=rows_R,
            use_cache=False,
        ).logits[0]
        tokens_N = torch.tensor([self._tokens[node] for node in nodes])
        if exact:
            return token_logprobs(logits_RV[row_of_N], tokens_N, temperature)
        logprobs_RV = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
        return logprobs_RV[row_of_N, tokens_N]
