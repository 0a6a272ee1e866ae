"""The names of MTP heads in a target's checkpoint."""

from __future__ import annotations

import re

_MTP = re.compile(r"mtp\.|model\.mtp\.|model\.mtp_layers\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def is_mtp_tensor(name: str, num_layers: int, num_mtp_layers: int) -> bool:
    """Whether the tensor predicts tokens beyond the next, and is no part of the target itself.

    ``num_layers``: of the target; in DeepSeek-V3's layout the heads are the ``num_mtp_layers``
    layers after those.
    """
    layer = _LAYER.match(name)
    is_after = layer is not None and 0 <= int(layer[1]) - num_layers < num_mtp_layers
    return is_after or bool(_MTP.match(name))
