"""vLLM's plugin: ``specrollout.NgramProposer`` as a short name of the proposer."""

from __future__ import annotations

import sys
from types import ModuleType


class _ShortName(ModuleType):
    """A module whose attributes are those of `spec_workers.vllm`, imported when first asked for:
    vLLM loads plugins in each of its processes, and only one of them drafts."""

    def __getattr__(self, name: str) -> object:
        import spec_workers.vllm

        return getattr(spec_workers.vllm, name)


def register() -> None:
    """Called by vLLM in each of its processes, maybe more than once."""
    sys.modules.setdefault("specrollout", _ShortName("specrollout"))
