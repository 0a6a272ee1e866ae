"""Weight updates: their transports and sources, and the transaction that applies them."""
