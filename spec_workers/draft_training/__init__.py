"""Training drafts: on recorded rollouts, or on what an engine rolls out as it goes."""
