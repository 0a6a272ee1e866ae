"""The cluster's calls that have to do with the corpora its drafts come from."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Any

from rollout.checked import checked_member
from rollout.cluster.external_corpora import ExternalCorpora
from rollout.cluster.replica_manager import ReplicaManager
from rollout.engine.draft_corpus import ExternalCorpus, Publishing, check_name


class ClusterCorpusCalls:
    """A part of RolloutCluster; its calls mean what those of `RolloutEngine` do."""

    members: ReplicaManager
    _externals: ExternalCorpora

    def add_external_corpus(
        self,
        name: str | None = None,
        *,
        documents: Sequence[str] | None = None,
        token_chunks: Sequence[Sequence[int]] | None = None,
        file_path: str | os.PathLike[str] | None = None,
        publish: Publishing | str = Publishing.WHEN_READY,
        wait: bool = False,
    ) -> str:
        """Each replica loads it; a file under the same path. Documents are kept for those that
        start later, until it is removed."""
        if name is None:
            name = uuid.uuid4().hex
        check_name("name", name)
        publishing = checked_member(publish, "publish", Publishing)
        given = {"documents": documents, "token_chunks": token_chunks, "file_path": file_path}
        source = {
            key: self.members.share(value) for key, value in given.items() if value is not None
        }
        self._externals.add(name, source, publishing)
        if wait:
            self._externals.wait(name)
        return name

    def remove_external_corpus(self, name: str) -> None:
        self._externals.remove(name)

    def publish_external_corpus(self, name: str) -> None:
        self._externals.publish(name)

    def external_corpora(self) -> list[ExternalCorpus]:
        """Ready or published where it is on all replicas; its progress is the slowest one's."""
        return self._externals.listed()

    def save_corpus(self, path: str | os.PathLike[str]) -> None:
        """One replica's: of its own rollouts alone, where replicas do not share theirs."""
        self.members.on_one("save_corpus", os.fspath(path))

    def load_corpus(self, path: str | os.PathLike[str]) -> None:
        """On every replica, under the same path; those that start later load it too."""
        self.members.on_all("load_corpus", os.fspath(path))
        self._externals.note_loaded(os.fspath(path))

    def learned(self) -> dict[str, Any]:
        """One replica's."""
        return self.members.on_one("learned")
