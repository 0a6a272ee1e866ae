"""vLLM's plugin: ``specrollout.NgramProposer`` as a short name of the proposer."""

from __future__ import annotations

import sys
from types import ModuleType


class _ShortName(ModuleType):
    """A module with the public names of `spec_workers.vllm`, which is imported when one is asked
    for: vLLM loads plugins in each of its processes, and few of them draft."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):  # whoever looks through all modules asks for such names
            raise AttributeError(name)
        import spec_workers.vllm

        return getattr(spec_workers.vllm, name)


def register() -> None:
    """Called by vLLM in each of its processes, maybe more than once."""
    sys.modules.setdefault("specrollout", _ShortName("specrollout"))
