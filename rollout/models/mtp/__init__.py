"""Multi-token prediction: chains of one-layer drafts, one network per step."""
