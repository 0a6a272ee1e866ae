"""The weights that updates switch between, and which of them each weight version names."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NOISE = 0.05  # of a policy's weights, relative to their standard deviation


def save_policies(model: Path, root: Path, count: int) -> list[Path]:
    """``count`` folders below ``root``: a copy of the model, then copies with other weights."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    folders = []
    for policy in range(count):
        folder = root / f"policy{policy}"
        ignored = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json")
        shutil.copytree(model, folder, ignore=ignored)
        generator = torch.Generator().manual_seed(policy)
        own = {name: _shifted(value, policy, generator) for name, value in tensors.items()}
        save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    return folders


def _shifted(tensor: torch.Tensor, policy: int, generator: torch.Generator) -> torch.Tensor:
    if policy == 0 or tensor.ndim < 2:
        return tensor
    noise = torch.randn(tensor.shape, generator=generator)
    values = tensor.float()
    return (values + NOISE * values.std() * noise).to(tensor.dtype)


@dataclass(frozen=True, slots=True)
class Installed:
    policy: int
    recomputed: bool  # the update made requests in flight compute their KV again


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of updates and aborts when a request was sent."""

    version: int
    updates_begun: int
    was_updating: bool
    aborts_ended: int


class History:
    """The policy that each weight version names, and the events that may end requests in flight."""

    def __init__(self) -> None:
        self.installed = {0: Installed(0, True)}
        self.version = 0  # the last one that an update answered for
        self.updates_begun = self.updates_ended = 0
        self.aborts_begun = self.aborts_ended = 0

    def next_version(self, policy: int, recomputed: bool) -> int:
        """A version for an update that is about to be sent."""
        version = max(self.installed) + 1
        self.installed[version] = Installed(policy, recomputed)
        return version

    def now(self) -> Moment:
        is_updating = self.updates_begun > self.updates_ended
        return Moment(self.version, self.updates_begun, is_updating, self.aborts_ended)

    def is_exact(self, version: int, sent: Moment) -> bool:
        """Whether a request's KV is all of this version wherever the version made a token of it.

        After an update in place it holds keys of other weights, unless the request came later.
        """
        return self.installed[version].recomputed or sent.version >= version

    def is_stable_since(self, sent: Moment) -> bool:
        """No update was under way then, and none has begun."""
        return not sent.was_updating and sent.updates_begun == self.updates_begun

    def may_be_aborted(self, sent: Moment) -> bool:
        return self.aborts_begun > sent.aborts_ended
