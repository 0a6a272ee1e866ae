"""The calls that clients of sglang make, with the names and shapes they know."""
