"""A step on its device: batch layout, transfers, attention plans, CUDA graphs and warm-up."""
