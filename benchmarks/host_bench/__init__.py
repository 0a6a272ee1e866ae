"""What the host does in a step on a GPU, around a device that takes no time."""
