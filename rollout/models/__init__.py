"""Models: their configurations and checkpoints, and the networks of each family."""
