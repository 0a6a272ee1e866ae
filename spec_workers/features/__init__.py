"""Hidden states of rollouts in shared memory, for draft training."""
