"""A step of the loop: its timer, how workers observe it, and what is learned from it."""
