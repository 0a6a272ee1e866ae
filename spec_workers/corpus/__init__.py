"""The n-gram corpus as workers use it: what it learns, what is loaded, what replicas exchange."""
