"""Speculative workers, one for each kind of drafts; an engine is given one of them."""
