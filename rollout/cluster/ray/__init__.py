"""Replicas as Ray actors. Nothing outside this folder imports Ray."""
