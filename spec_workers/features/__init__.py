"""Hidden states of rollouts, for draft training."""
