"""Layers of models, whose weights are stored to suit the device and updated in place."""
