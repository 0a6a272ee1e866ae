"""Which draft nodes the target's own samples confirm.

At every tree node the target has sampled its next token. The walk from the root follows the child
that equals that sample and stops where there is none, so what is emitted is always the target's
own sample: the draft decides how many samples one forward yields and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence


def accept(
    draft_tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]
) -> list[int]:
    """Walk one draft tree.

    Args:
        draft_tokens: token of draft node j, which is tree node j + 1.
        parents: its parent in tree numbering (0 is the root); parents come before children.
        sampled: the target's sample at each tree node, the root first: one more than drafts.

    Returns the accepted tree nodes in path order. The tokens emitted are ``sampled[0]`` and then
    ``sampled[node]`` for each of them. Of equal siblings the first counts.
    """
    path: list[int] = []
    node = 0
    for child, (token, parent) in enumerate(zip(draft_tokens, parents, strict=True), start=1):
        if parent == node and token == sampled[node]:
            path.append(child)
            node = child
    return path
