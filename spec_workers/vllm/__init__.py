"""The n-gram corpus as a proposer inside vLLM. Imports nothing of vLLM."""

from spec_workers.vllm.proposer import NgramProposer
from spec_workers.vllm.worker_extension import CorpusWorkerExtension

__all__ = ["CorpusWorkerExtension", "NgramProposer"]
