"""`Guesser.children` on the device, where the draft's logits are, without a read.

The same formulas as `shared_noise`, `mixture` and `reliability`, which are the reference and learn:
what they learned comes as two small tables. Probabilities agree with theirs to rounding.

Legend: G trees, R rows of logits (as many of each tree, side by side), D draft vocabulary, C
candidates, W children, K components, X contexts that learn apart, P knots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops.truncation import truncation_threshold
from rollout.ops.uniforms import uniforms
from rollout.types import Request
from spec_workers.neural.mixture import CONFIDENT, KNOTS_P, depth_bucket
from spec_workers.neural.shared_noise import CANDIDATES, SHARPNESS, WIDTHS, likeliest

Tensors = dict[str, torch.Tensor]


@dataclass(kw_only=True, slots=True)
class DeviceGuessed:
    """The children of rows, and what is learned from later."""

    tokens_RW: torch.Tensor  # int64, of the target's vocabulary
    estimates_RW: torch.Tensor  # float32, the most probable first
    index_RC: torch.Tensor  # int64; see `shared_noise.Candidates`
    probs_RC: torch.Tensor  # float32
    ends_RC: torch.Tensor  # float32


def noise_inputs(
    requests: list[Request], ends_G: NDArray[np.int64], padding: int
) -> dict[str, NDArray]:
    """The inputs of samples beside logits, for `DeviceGuesser.children`; ``top_k`` is there where
    any request truncates. ``padding``: trees behind those of the requests."""
    params = [request.params for request in requests]
    arrays: dict[str, NDArray] = {
        "seeds": np.array([each.seed for each in requests], dtype=np.uint64).view(np.int64),
        "ends": ends_G,
        "temperature": np.array([each.temperature for each in params], dtype=np.float32),
    }
    if any(each.truncates for each in params):
        arrays["top_k"] = np.array([each.top_k for each in params], dtype=np.int64)
        arrays["top_p"] = np.array([each.top_p for each in params], dtype=np.float32)
        arrays["min_p"] = np.array([each.min_p for each in params], dtype=np.float32)
    padded = {name: np.pad(array, (0, padding)) for name, array in arrays.items()}
    if "top_p" in padded:
        padded["top_p"][len(requests) :] = 1.0
    return padded


class DeviceGuesser:
    """See `Guesser`."""

    def __init__(self, topk: int, token_ids_D: torch.Tensor | None, device: torch.device) -> None:
        self._topk = topk
        self._token_ids_D = token_ids_D

        def constant(values: object, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self._widths_K = constant(WIDTHS, torch.float64)
        self._sharpness_K = constant(SHARPNESS, torch.float32)
        self._knots_P = constant(KNOTS_P.tolist(), torch.float64)

    def children(self, logits_RD: torch.Tensor, inputs: Tensors, depth: int) -> DeviceGuessed:
        """The children of nodes of one depth, 0 for roots.

        ``inputs``: `noise_inputs`, and what was learned: ``weights`` float32 [X, K] of the mixture
        and ``ratios`` float64 [X, P] of the reliability.
        """
        each = len(logits_RD) // len(inputs["ends"])

        def by_row(name: str) -> torch.Tensor:
            return inputs[name][:, None].expand(-1, each).reshape(-1)

        temperature_R = by_row("temperature")
        is_greedy_R = temperature_R == 0
        logits_RD = logits_RD.float() / temperature_R.masked_fill(is_greedy_R, 1.0)[:, None]
        if "top_k" in inputs:
            threshold_R = truncation_threshold(
                logits_RD,
                torch.ones_like(temperature_R),  # it was applied before
                by_row("top_k"),
                by_row("top_p"),
                by_row("min_p"),
            )
            logits_RD.masked_fill_(logits_RD < threshold_R[:, None], float("-inf"))
        uniforms_R = uniforms(by_row("seeds"), by_row("ends") + depth)
        index_RC, probs_RC, ends_RC = likeliest(logits_RD, uniforms_R, CANDIDATES)
        components_RCK = torch.where(
            is_greedy_R[:, None, None],
            self._sharpened(probs_RC),
            self._in_windows(probs_RC, ends_RC, uniforms_R),
        )
        contexts_R = (is_greedy_R.long() * 4 + depth_bucket(depth)) * (len(CONFIDENT) + 1)
        highest_R = probs_RC.amax(dim=1)
        for threshold in CONFIDENT:
            contexts_R = contexts_R + (highest_R > threshold)
        # The last component believes in none.
        weights_R1K = inputs["weights"][contexts_R][:, None, :-1]
        by_mixture_RC = (components_RCK * weights_R1K).sum(dim=2).clamp(max=1.0)
        estimates_RC = self._corrected(by_mixture_RC, inputs["ratios"][contexts_R])
        best_RW = estimates_RC.sort(dim=1, descending=True, stable=True).indices[:, : self._topk]
        tokens_RW = index_RC.gather(1, best_RW)
        if self._token_ids_D is not None:
            tokens_RW = self._token_ids_D[tokens_RW]
        return DeviceGuessed(
            tokens_RW=tokens_RW,
            estimates_RW=estimates_RC.gather(1, best_RW),
            index_RC=index_RC,
            probs_RC=probs_RC,
            ends_RC=ends_RC,
        )

    def _in_windows(
        self, probs_RC: torch.Tensor, ends_RC: torch.Tensor, uniforms_R: torch.Tensor
    ) -> torch.Tensor:
        """`window_probabilities`."""
        low_RK = (uniforms_R[:, None] - self._widths_K).clamp(min=0.0)
        high_RK = (uniforms_R[:, None] + self._widths_K).clamp(max=1.0)
        begins_RC = ends_RC - probs_RC
        overlap_RCK = torch.minimum(ends_RC.double()[:, :, None], high_RK[:, None])
        overlap_RCK -= torch.maximum(begins_RC.double()[:, :, None], low_RK[:, None])
        return (overlap_RCK.clamp_(min=0.0) / (high_RK - low_RK)[:, None]).float()

    def _sharpened(self, probs_RC: torch.Tensor) -> torch.Tensor:
        """`sharpened_probabilities`."""
        highest_R11 = probs_RC.amax(dim=1).clamp(min=1e-30)[:, None, None]
        powers_RCK = (probs_RC[:, :, None] / highest_R11) ** self._sharpness_K
        sums_RK = powers_RCK.sum(dim=1)
        sums_RK[:, 0] = 1.0 / highest_R11[:, 0, 0]
        return powers_RCK / sums_RK.clamp(min=1e-30)[:, None]

    def _corrected(self, estimates_RC: torch.Tensor, ratios_RP: torch.Tensor) -> torch.Tensor:
        """`Reliability.corrected`."""
        knots_P, exact_RC = self._knots_P, estimates_RC.double()
        below_RC = (exact_RC[:, :, None] >= knots_P[1:-1]).sum(dim=2)
        begin_RC, end_RC = knots_P[below_RC], knots_P[below_RC + 1]
        share_RC = ((exact_RC - begin_RC) / (end_RC - begin_RC)).clamp(0.0, 1.0)
        ratio_RC = ratios_RP.gather(1, below_RC) * (1 - share_RC)
        ratio_RC += ratios_RP.gather(1, below_RC + 1) * share_RC
        return (exact_RC * ratio_RC).clamp(max=1.0).float()
