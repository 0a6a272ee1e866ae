"""A step on its device: batch layout, attention plans, captured forwards and warm-up."""
