"""`specrollout compare`: plain and speculative decoding of the same work, in turns."""
