"""The n-gram corpus: draft trees from earlier tokens. Knows nothing of models or engines."""

from ngram_native._ext import Proposal
from ngram_native.corpus import MAX_BUDGET, Corpus, Source

__all__ = ["MAX_BUDGET", "Corpus", "Proposal", "Source"]
