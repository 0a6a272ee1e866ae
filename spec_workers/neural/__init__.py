"""Drafts by networks: their KV, how their trees grow, and what their guesses are worth."""
