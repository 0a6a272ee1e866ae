"""The n-gram corpus: draft trees from earlier tokens. Knows nothing of models or engines."""

from ngram_native._ext import ExternalBuilder, Proposal, Withdrawn
from ngram_native.corpus import MAX_BUDGET, Corpus, Source, flat_documents

__all__ = [
    "MAX_BUDGET",
    "Corpus",
    "ExternalBuilder",
    "Proposal",
    "Source",
    "Withdrawn",
    "flat_documents",
]
