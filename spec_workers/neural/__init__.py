"""Drafts by networks: their KV, how their trees grow, and how far their guesses are trusted."""
