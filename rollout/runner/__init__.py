"""A step on its device: batch layout, transfers, attention plans, captured forwards and warm-up."""
