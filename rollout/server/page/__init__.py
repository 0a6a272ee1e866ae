"""The status page: what the engine is doing, for people in `/` and for programs in `/status`."""
