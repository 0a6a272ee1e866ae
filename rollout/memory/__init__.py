"""Memory of an engine: KV slots, the prefix cache, recurrent states, and how large each is."""
