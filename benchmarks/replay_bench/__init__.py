"""Recorded rollouts forced through a real engine over a model of random weights."""
