"""The corpus's calls for vLLM's ``collective_rpc``."""

from __future__ import annotations

from typing import Any

from spec_workers.vllm.proposer import NgramProposer


class CorpusWorkerExtension:
    """Methods that vLLM adds to its worker: ``worker_extension_cls``.

    ``llm.collective_rpc("set_corpus_policy", args=(version,))`` reaches the proposer in whatever
    process it runs. On a worker that does not draft the calls do nothing. All raise
    InvalidInputError as `NgramProposer`'s do.
    """

    model_runner: Any  # vLLM's worker has it

    def set_corpus_policy(self, version: int) -> None:
        """Tell that the weights changed: tokens of older versions count for less."""
        if (proposer := _proposer_of(self.model_runner)) is not None:
            proposer.set_weight_version(version)

    def add_external_corpus(
        self,
        name: str,
        documents: list[str] | None = None,
        token_chunks: list[list[int]] | None = None,
        file_path: str | None = None,
    ) -> None:
        """Load texts, token ids or a JSONL file to draft from, in the background."""
        if (proposer := _proposer_of(self.model_runner)) is not None:
            proposer.add_external_corpus(
                name, documents=documents, token_chunks=token_chunks, file_path=file_path
            )

    def remove_external_corpus(self, name: str) -> None:
        """Forget an external corpus, or cancel its load."""
        if (proposer := _proposer_of(self.model_runner)) is not None:
            proposer.remove_external_corpus(name)

    def save_corpus(self, path: str) -> None:
        """Write the corpus to a file, whole or not at all. Ranks that draft alike write the same
        content."""
        if (proposer := _proposer_of(self.model_runner)) is not None:
            proposer.save_corpus(path)

    def load_corpus(self, path: str) -> None:
        """Replace the corpus by a saved one."""
        if (proposer := _proposer_of(self.model_runner)) is not None:
            proposer.load_corpus(path)

    def corpus_counters(self) -> dict[str, float]:
        """Gauges and running totals of corpus and drafts by name; none without a proposer."""
        proposer = _proposer_of(self.model_runner)
        if proposer is None:
            return {}
        loads = {f"external/{each.name}": each.state.value for each in proposer.external_corpora()}
        published = {name: float(state == "published") for name, state in loads.items()}
        return proposer.counters() | published


def _proposer_of(model_runner: Any) -> NgramProposer | None:
    drafter = getattr(model_runner, "drafter", None)
    return drafter if isinstance(drafter, NgramProposer) else None
