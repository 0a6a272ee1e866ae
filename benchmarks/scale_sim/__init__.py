"""A discrete-event simulation of many replicas."""
