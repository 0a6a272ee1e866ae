"""vLLM's dialect: tokens in, tokens out, and the calls by which trainers change the engine."""
