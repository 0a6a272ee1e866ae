"""Speculative workers: what each proposes and observes. The engine is handed one of them."""
