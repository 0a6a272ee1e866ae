"""The rollout engine: generation, weights, sleep and corpora around one speculative worker."""
