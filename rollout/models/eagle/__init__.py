"""EAGLE drafts: one decoder layer over the target's embedding and hidden states."""
